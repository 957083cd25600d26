"""Collectives, exchanges and one-sided operations on memory of a GPU, over the fake driver."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import launcher, mpi_rows
from support.starting import finished, succeeded
from tiers import full

pytestmark = pytest.mark.gate  # the fake driver is built first

PROGRAM = Path(__file__).parent / "programs" / "collectives.py"
ONE_SIDED = PROGRAM.with_name("one_sided.py")
PARTS = ["allreduces", "long_arrays", "handles", "bound", "pool", "exchanges", "updates"]
Fake = Callable[..., dict[str, str]]


@pytest.mark.parametrize("size", full([2, 3], quick=1))
def test_threads(fake: Fake, size: int) -> None:
    command = [sys.executable, str(PROGRAM), str(size), *PARTS]
    assert json.loads(succeeded(command, env=fake(), timeout=120)) == PARTS


@pytest.mark.parametrize("size", full([2, 1, 3], quick=0))
def test_processes(fake: Fake, size: int) -> None:
    command = launcher.command("-n", str(size), "--no-prefix", str(PROGRAM), "0", *PARTS)
    assert json.loads(succeeded(command, env=fake(), timeout=200)) == PARTS


@pytest.mark.parametrize("how", full(["abreast", "apart"], quick=2))
def test_a_gpu_for_each_rank(fake: Fake, how: str) -> None:
    parts = ["allreduces", "handles", "bound", "exchanges", "updates"]
    command = launcher.command("-n", "2", "--no-prefix", str(PROGRAM), f"{how} 0", *parts)
    assert json.loads(succeeded(command, env=fake(devices=2), timeout=200)) == parts


def test_a_gpu_that_is_not_seen_and_not_reached(fake: Fake) -> None:
    command = launcher.command("-n", "2", "--no-prefix", str(PROGRAM), "apart 0", "bound")
    done = finished(command, env=fake(devices=2, lacks="unseen"), timeout=60)
    assert done.returncode != 0 and "let CUDA_VISIBLE_DEVICES name it" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("path", [{}, {"PGASDL_GPU": "staged"}], ids=["mapped", "staged"])
def test_updates_in_a_capture(fake: Fake, path: dict[str, str]) -> None:
    command = launcher.command("-n", "2", "--no-prefix", str(PROGRAM), "0", "captured_updates")
    shown = succeeded(command, env=fake() | path, timeout=100)
    assert json.loads(shown) == ["captured_updates"]


# Arrays of 12 kB have 16 pieces then, in which nearly every plan travels.
STAGED = {"PGASDL_GPU": "staged", "PGASDL_GPU_PIECE": "768"}


@pytest.mark.parametrize("size", full([3, 1, 2], quick=1))
def test_staged_if_asked_for(fake: Fake, size: int) -> None:
    parts = ["staged", *PARTS]
    command = launcher.command("-n", str(size), "--no-prefix", str(PROGRAM), "0", *parts)
    assert json.loads(succeeded(command, env=fake() | STAGED, timeout=300)) == parts


@pytest.mark.parametrize("size", full([3, 2], quick=0))
def test_threads_that_map_nothing(fake: Fake, size: int) -> None:
    """Plans work on a GPU's memory, and the transport carries it."""
    command = [sys.executable, str(PROGRAM), f"unmapped {size}", *PARTS]
    assert json.loads(succeeded(command, env=fake(), timeout=120)) == PARTS


@pytest.mark.parametrize("size", full([3, 2], quick=0))
def test_staged_threads_that_map_nothing(fake: Fake, size: int) -> None:
    command = [sys.executable, str(PROGRAM), f"unmapped {size}", "staged", *PARTS]
    shown = succeeded(command, env=fake() | STAGED, timeout=300)
    assert json.loads(shown) == ["staged", *PARTS]


@pytest.mark.parametrize("path", [{}, STAGED], ids=["mapped", "staged"])
def test_beside_calls_that_hold_up_others(fake: Fake, path: dict[str, str]) -> None:
    command = launcher.command("-n", "2", str(PROGRAM.with_name("held.py")))
    shown = succeeded(command, env=fake(holds=1) | path, timeout=60)
    assert shown == "[0] right\n[1] right\n" or shown == "[1] right\n[0] right\n"


@pytest.mark.parametrize("windows", ["allocated", "created"])
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
@pytest.mark.full
def test_staged_over_mpi(fake: Fake, mpi: str, windows: str) -> None:
    """Peers reach only host memory of MPI's windows, mapped or not."""
    if missing := mpi_rows.missing(mpi):
        pytest.skip(missing)
    row = mpi_rows.ROWS[mpi]
    parts = ["staged", *PARTS]
    environ = fake() | STAGED | {"PGASDL_TRANSPORT": "mpi", "PGASDL_MPI_WINDOWS": windows}
    command = launcher.command(f"--mpi={row.launcher}", "-n", "2", str(PROGRAM), "0", *parts)
    assert json.dumps(parts) in succeeded(command, env=row.environ(environ), timeout=300)


@pytest.mark.parametrize("size", full([2, 1, 3], quick=1))
def test_one_sided_threads(fake: Fake, size: int) -> None:
    command = [sys.executable, str(ONE_SIDED), str(size)]
    assert succeeded(command, env=fake(), timeout=60) == "right\n"


@pytest.mark.parametrize("size", full([3, 2], quick=1))
def test_one_sided_processes(fake: Fake, size: int) -> None:
    command = launcher.command("-n", str(size), str(ONE_SIDED), "0")
    shown = succeeded(command, env=fake(), timeout=60)
    assert sorted(shown.splitlines()) == [f"[{rank}] right" for rank in range(size)]
