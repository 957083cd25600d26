"""Start programs as a user does, ``pgasdl run --mpi=... -n N``, and return how they ended."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support import launcher
from support.environment import environment
from support.mpi_rows import Row
from support.places import APPS, TESTS
from support.starting import finished

PROGRAMS = Path(__file__).parent / "programs"
TRAINING = TESTS / "training"


def variables_of(mpi: Row | None, **variables: str) -> dict[str, str]:
    """The environment of a job under an MPI; its programs import tools of the training tests."""
    environ = environment(TRAINING, APPS, **({"OMP_NUM_THREADS": "1"} | variables))
    return mpi.environ(environ) if mpi else environ


def start(
    mpi: Row | None,
    size: int,
    program: Path,
    *arguments: str,
    timeout: float = 120,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program on ``size`` ranks under an MPI; None: under `pgasdl run` alone."""
    options = [f"--mpi={mpi.launcher}"] if mpi else ["--no-prefix"]
    return finished(
        launcher.command(*options, "-n", str(size), str(program), *arguments),
        env=variables_of(mpi, **variables),
        timeout=timeout,
    )


def run(
    mpi: Row | None,
    size: int,
    program: Path,
    *arguments: str,
    timeout: float = 120,
    **variables: str,
) -> list[str]:
    """Run a program, which must end with 0; return the lines that it printed, sorted."""
    done = start(mpi, size, program, *arguments, timeout=timeout, **variables)
    assert done.returncode == 0, f"{program.name} ended with {done.returncode}:\n{done.stderr}"
    # MPICH forwards the output of ranks in pieces of its own.
    return sorted(filter(None, (line.strip() for line in done.stdout.splitlines())))
