"""Random programs, each checked by the oracle: the same seeds in every run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.environment import environment
from support.places import TESTS
from support.starting import finished

HERE = Path(__file__).parent
JOBS = str(len(os.sched_getaffinity(0)))


def run(*arguments: str, folder: Path = HERE, timeout: float = 280) -> tuple[int, str]:
    """Status and output of run.py."""
    command = [sys.executable, str(folder / "run.py"), *arguments]
    done = finished(command, env=environment(), timeout=timeout)
    return done.returncode, done.stdout + done.stderr


def must_pass(*arguments: str, timeout: float = 280) -> None:
    status, output = run("--jobs", JOBS, *arguments, timeout=timeout)
    assert status == 0, output


def test_over_loopback() -> None:
    must_pass("--seeds", "0:96")


@pytest.mark.parametrize(("way", "seeds"), [("shm", "0:64"), ("tcp", "64:96")])
def test_over_processes(way: str, seeds: str) -> None:
    must_pass("--seeds", seeds, "--way", way)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_more_over_loopback() -> None:
    must_pass("--seeds", "96:4256", timeout=1800)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("way", "seeds"), [("shm", "1024:1536"), ("tcp", "1536:2048")])
def test_more_over_processes(way: str, seeds: str) -> None:
    must_pass("--seeds", seeds, "--way", way, timeout=1800)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_under_a_sanitizer(sanitizer: str) -> None:
    must_pass("--seeds", "0:96", "--sanitizer", sanitizer, "--timeout", "60", timeout=3600)


@pytest.mark.timeout(0)
def test_as_many_as_are_wanted(request: pytest.FixtureRequest) -> None:
    seeds = request.config.getoption("--seeds", default=None)
    if not seeds:
        pytest.skip("--seeds FROM:TO runs more (pytest tests/random_programs --seeds 0:100000)")
    must_pass("--seeds", seeds, timeout=1e6)


def test_a_program_is_its_seed() -> None:
    """Every rank and every run makes the same program from a seed, whatever ran before."""
    show = "import generator as g; print(*map(g.program_of, range(200)), sep='\\n')"
    texts = {
        subprocess.run(
            [sys.executable, "-c", show], cwd=HERE, stdout=subprocess.PIPE, check=True, timeout=60,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(texts) == 1


@pytest.mark.full
def test_what_fails_is_reported_and_shrunk(tmp_path: Path) -> None:
    """With a wrong oracle: shrinking leaves the shortest program that can fail."""
    folder = tmp_path / "programs"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HERE, folder, ignore=ignore)
    shutil.copytree(TESTS / "support", tmp_path / "support", ignore=ignore)
    oracle = folder / "oracle.py"
    text = oracle.read_text()
    assert "RATE = 0.25" in text
    oracle.write_text(text.replace("RATE = 0.25", "RATE = 0.5"))
    collectives = folder / "collectives.py"
    text = collectives.read_text()
    hook = "block.weights -= block.gradient * block.gradient.dtype.type(RATE)"
    assert hook in text
    collectives.write_text(text.replace(hook, hook.replace("RATE", "0.25")))
    arguments = ("--only", "allreduce,exchanges,groups", "--most", "1", "--shrink")
    status, output = run("--seeds", "0:64", *arguments, folder=folder)
    assert status == 1
    found = re.search(r"^again: (--way loopback --seeds \d+:\d+ --steps [\d,]+)$", output, re.M)
    assert found, output
    steps = re.findall(r"^ +\d+ (?:\w+ = )?(\w+)\(", output, re.M)
    assert sorted(steps) in (["exchange", "iterate"], ["exchange", "group", "iterate"]), output
    again = (*found[1].split(), *arguments[:2])
    assert run(*again, folder=folder)[0] == 1  # the printed command fails again
    assert run(*again)[0] == 0  # and it passes where the oracle is right
