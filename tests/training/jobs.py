"""Start programs as a user does, ``pgasdl run -n N``, and return what they print."""

from __future__ import annotations

import sys
from pathlib import Path

from support import launcher
from support.environment import environment
from support.places import APPS
from support.starting import succeeded

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
FOLDERS = (HERE, APPS)  # whose modules the programs import


def run(size: int, program: Path, *arguments: str, timeout: float = 120) -> str:
    """Run a program on ``size`` ranks (0: without a launcher); return its standard output."""
    command = launcher.command("-n", str(size)) if size else [sys.executable]
    return succeeded(
        [*command, str(program), *arguments], env=environment(*FOLDERS), timeout=timeout
    )
