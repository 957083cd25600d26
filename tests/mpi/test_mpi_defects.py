"""Defects that pgasdl/mpi.py works around. One that is gone fails here: so can its way round."""

from __future__ import annotations

import os
import subprocess
import sys

import mpi_jobs
import pytest

from pgasdl.launch.mpiexec import KINDS, Mpiexec, find, library_beside

PROGRAM = mpi_jobs.PROGRAMS / "defect.py"


def seen(found: Mpiexec, defect: str) -> subprocess.CompletedProcess[str]:
    """Two ranks of mpi4py alone, without what pgasdl sets."""
    environ = mpi_jobs.environment()
    environ.pop("OMPI_MCA_osc", None)
    return subprocess.run(
        found.command(2, [sys.executable, str(PROGRAM), defect]),
        env=environ | found.environ(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(
    os.path.isdir("/sys/class/infiniband"), reason="seen where there is no RDMA device"
)
def test_ucx_complains_of_every_window(kind: str) -> None:
    done = seen(find(kind), "window")
    assert done.returncode == 0, done.stderr
    if "Open MPI v5.0.11" in done.stdout:
        assert "OSC UCX component priority" in done.stderr, "OMPI_MCA_osc=^ucx is not needed now"


def test_compare_and_swap_on_oneself(kind: str) -> None:
    done = seen(find(kind), "own")
    assert done.returncode == 0, done.stderr


def test_compare_and_swap_on_oneself_in_debians_open_mpi() -> None:
    program = "/usr/bin/mpirun.openmpi"
    library = library_beside(program, KINDS["openmpi"]) if os.path.exists(program) else None
    if library is None:
        pytest.skip(f"no {program}")
    done = seen(Mpiexec("openmpi", program, library), "own")
    if "Open MPI v4.1.4" in done.stdout:
        assert done.returncode != 0, "own_by_processor is not needed now"
    assert done.returncode == 0 or "Segmentation fault" in done.stderr
