"""Work in the root of the clone, as newcomers do: its source folder has no compiled part."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.environment import environment
from support.places import ROOT
from support.starting import finished
from tiers import full

QUICK = ("-n", "2", "--repeat", "1", "--seconds", "0.001")
HELLO = "import pgasdl\nwith pgasdl.init() as ctx: print('rank', ctx.rank, 'of', ctx.size)\n"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the package, and a program in a folder beside it, as in apps/."""
    ignore = shutil.ignore_patterns("_native*.so", "__pycache__")
    shutil.copytree(ROOT / "pgasdl", tmp_path / "pgasdl", ignore=ignore)
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "hello.py").write_text(HELLO)
    return tmp_path


def stand_in(clone: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return finished(
        [sys.executable, *arguments],
        env=environment(PYTHONDONTWRITEBYTECODE="1", **variables),
        timeout=240,
        cwd=clone,
    )


def command(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The ``pgasdl`` command: a script in another folder; -P stands in for just that."""
    return stand_in(clone, "-P", "-m", "pgasdl", *arguments)


COMMANDS = {
    "run": ("run", "-n", "2", "programs/hello.py"),
    "env": ("env",),
    "doctor": ("doctor",),
    "version": ("version",),
    "sim": ("sim", "-n", "4", "--plans", "ring"),
    "tune": ("tune", *QUICK, "--sizes", "64"),
    "bench write_notify": ("bench", "write_notify", *QUICK, "--sizes", "8"),
    "bench allreduce": ("bench", "allreduce", *QUICK, "--sizes", "8"),
    "bench plans": ("bench", "plans", *QUICK, "--sizes", "64"),
}


@pytest.mark.parametrize("name", full(COMMANDS, quick=2))
def test_every_command_works_there(clone: Path, name: str) -> None:
    done = command(clone, *COMMANDS[name])
    assert done.returncode == 0, done.stdout + done.stderr
    # Not even from workers, nor from doctor's probes of the MPIs, whose errors it survives.
    assert "_native" not in done.stdout + done.stderr


@pytest.mark.parametrize("start", [("mine.py",), ("-m", "mine"), ("-c", HELLO)])
def test_a_program_beside_the_source_folder_takes_the_installed_package(
    clone: Path, start: tuple[str, ...]
) -> None:
    (clone / "mine.py").write_text(f"{HELLO}print(pgasdl.__file__, pgasdl.context.__file__)\n")
    done = stand_in(clone, "-P", "-m", "pgasdl", "run", "-n", "2", *start)
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2" in done.stdout
    assert str(clone) not in done.stdout


def test_a_source_folder_alone_says_what_to_do(clone: Path) -> None:
    done = stand_in(clone, "-S", "-c", "from pgasdl import _native", PYTHONPATH="")
    assert done.returncode == 1
    assert f"{clone / 'pgasdl'} has no compiled part" in done.stderr
    assert "pip install ." in done.stderr
