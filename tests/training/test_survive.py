"""A rank is killed in training: the others go on, with the weights of a run of as many ranks."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from support import launcher
from support.environment import environment
from support.places import APPS
from support.starting import finished, read_line
from tiers import full

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import safetensors.torch
import survive
from image_tools import Course, as_before, digests, prepare  # noqa: F401

from pgasdl import loopback
from pgasdl.checkpoint import Checkpoints

PROGRAM = APPS / "survive.py"
SHORT = ("--pixels", "32", "--batch", "6", "--iterations", "8", "--every", "2")
LONGER = ("--pixels", "32", "--batch", "6", "--iterations", "30", "--every", "2")


def held(path: Path) -> dict[str, bytes]:
    """The bits of all tensors of a checkpoint but random numbers, which ranks as threads share."""
    return {
        name: each.numpy().tobytes()
        for name, each in safetensors.torch.load_file(path).items()
        if name != "random"
    }


def check(out: str, course: tuple[str, ...], checkpoints: Path, left: list[int]) -> None:
    """The survivors have the same bits: those of a run that begins with what they read."""
    bits = digests(out)
    assert len(bits) == len(left) and len(set(bits)) == 1, out
    assert "died, noticed" in out
    iteration = re.findall(rf"ranks {re.escape(str(left))} start from iteration (\d+)", out)[-1]
    name = f"{int(iteration):08d}.safetensors"
    other = checkpoints.with_name("other")
    other.mkdir()
    shutil.copy(checkpoints / name, other / name)
    data = ("--data", str(checkpoints / "pictures" / "train"))
    parsed = survive.options([*course, *data, "--checkpoints", str(other)])
    prepare(parsed)
    again = loopback.run(
        len(left), lambda ctx: survive.train(ctx, Course(parsed), Checkpoints(other))
    )
    assert {each[:16] for each in again} == set(bits)
    # The checkpoints after it, too, the last of all included.
    written = sorted(os.listdir(other))
    assert written[-1] == f"{parsed.iterations:08d}.safetensors"
    for each in written:
        assert held(other / each) == held(checkpoints / each), each


@pytest.mark.parametrize(("victim", "iteration"), full([(1, 3), (0, 5), (2, 7)], quick=1))
def test_killed_in_the_middle_of_a_step(victim: int, iteration: int, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    dies = ("--kill-rank", str(victim), "--at-iteration", str(iteration))
    done = finished(
        launcher.command(
            *("--keep-going", "-n", "3", str(PROGRAM), *SHORT),
            *("--checkpoints", str(checkpoints), *dies),
        ),
        env=environment(),
        timeout=120,
    )
    assert done.returncode == 128 + signal.SIGKILL, done.stdout + done.stderr
    left = [rank for rank in range(3) if rank != victim]
    assert f"ranks {left} start from iteration {iteration // 2 * 2}" in done.stdout
    check(done.stdout, SHORT, checkpoints, left)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
def test_killed_at_any_moment(seed: int, tmp_path: Path) -> None:
    """By another process; every second time a further rank is, soon after or much later."""
    drawn = random.Random(seed)
    size = 3 + seed % 2
    victims = drawn.sample(range(size), 1 + seed % 2)
    checkpoints = tmp_path / "checkpoints"
    with launcher.running(
        *("--keep-going", "-n", str(size), str(PROGRAM), *LONGER),
        *("--checkpoints", str(checkpoints)),
    ) as job:
        lines: list[str] = []
        while not (lines and re.search(r"iteration 1 of", lines[-1])):
            lines.append(read_line(job))
            assert lines[-1], "".join(lines)
        pids = dict(re.findall(r"rank (\d) is process (\d+)", "".join(lines)))
        for victim in victims:
            time.sleep(drawn.choice((0.02, 0.3)) * drawn.random())
            os.kill(int(pids[str(victim)]), signal.SIGKILL)
        rest, errors = job.communicate(timeout=120)
    out = "".join(lines) + rest
    assert job.returncode == 128 + signal.SIGKILL, out + errors
    check(out, LONGER, checkpoints, [rank for rank in range(size) if rank not in victims])
