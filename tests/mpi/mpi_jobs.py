"""Start programs as a user does, ``pgasdl run --mpi=... -n N``, and hand back how they ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.mpi_rows import Row

import pgasdl.config

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
TRAINING = ROOT / "tests" / "training"
# Where the pgasdl under test lies: the checkout's has no compiled part once it is installed.
PLACE = Path(pgasdl.config.__file__).parents[1]
_LAUNCHERS = ("PGASDL_", "PMI", "OMPI_", "PMIX_", "PRTE_", "SLURM_", "TORCHELASTIC", "MPI_LOCAL")


def environment(**variables: str) -> dict[str, str]:
    """This process's, without a launcher's traces."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
    paths = [str(PLACE), str(TRAINING), str(ROOT / "apps"), kept.get("PYTHONPATH", "")]
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return kept | {"OMP_NUM_THREADS": "1"} | variables


def start(
    mpi: Row | None,
    size: int,
    program: Path,
    *arguments: str,
    timeout: float = 120,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program on ``size`` ranks of an MPI; None: of `pgasdl run` alone."""
    launcher = [f"--mpi={mpi.launcher}"] if mpi else ["--no-prefix"]
    environ = environment(**variables)
    return subprocess.run(
        [sys.executable, "-m", "pgasdl", "run", *launcher, "-n", str(size), str(program),
         *arguments],
        env=mpi.environ(environ) if mpi else environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )  # fmt: skip


def run(
    mpi: Row | None,
    size: int,
    program: Path,
    *arguments: str,
    timeout: float = 120,
    **variables: str,
) -> list[str]:
    """The lines that a program printed, sorted; it has to end with 0."""
    done = start(mpi, size, program, *arguments, timeout=timeout, **variables)
    assert done.returncode == 0, f"{program.name} ended with {done.returncode}:\n{done.stderr}"
    # MPICH forwards what ranks write in pieces of its own.
    return sorted(filter(None, (line.strip() for line in done.stdout.splitlines())))
