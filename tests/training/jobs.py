"""Start programs as a user does, ``pgasdl run -n N``, and hand back what they print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pgasdl.config

ROOT = Path(__file__).parents[2]
APPS = ROOT / "apps"
PROGRAMS = Path(__file__).parent / "programs"
# Where the pgasdl under test lies: the checkout's has no compiled part once it is installed.
PLACE = Path(pgasdl.config.__file__).parents[1]


def environment() -> dict[str, str]:
    """This process's, without a launcher's traces."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PGASDL_")}
    paths = [str(PLACE), str(Path(__file__).parent), str(APPS), kept.get("PYTHONPATH", "")]
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return kept


def run(size: int, program: Path, *arguments: str, timeout: float = 120) -> str:
    """Run a program on ``size`` ranks, 0: without a launcher; return its standard output."""
    launcher = ["-m", "pgasdl", "run", "-n", str(size)] if size else []
    done = subprocess.run(
        [sys.executable, *launcher, str(program), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{program.name} ended with {done.returncode}:\n{done.stderr}"
    return done.stdout
