"""Every plan, and the training app, give the same bits over MPI as over shm."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import mpi_jobs
import pytest
from support.mpi_rows import ROWS, Row
from support.places import APPS

from pgasdl import plans

sys.path.insert(0, str(mpi_jobs.TRAINING))
from exchange_tools import REFERENCED, cases

pytestmark = pytest.mark.full

WAYS = [
    f"--epochs 1 --batch 120 --plan {plan} --kind {kind}"
    for plan in ("gdraa", "tree")
    for kind in ("average", "update")
]

NEWEST = [name for name, row in ROWS.items() if not row.is_debians]


def able_over(windows: str) -> set[str]:
    """Plans of exchanges that run over such windows on one machine."""
    return {
        name
        for name, spec in plans.PLANS.items()
        if {*plans.EXCHANGES} & {*spec.kinds} and (windows == "allocated" or not spec.mapped)
    }


@pytest.mark.parametrize("mpi", NEWEST, indirect=True)
@pytest.mark.parametrize(
    ("size", "progress", "windows"),
    [(2, "turn", "allocated"), (3, "thread", "allocated"), (2, "turn", "created")],
)
def test_every_case_of_every_plan(mpi: Row, size: int, progress: str, windows: str) -> None:
    able = {*REFERENCED} & able_over(windows)
    n_cases = sum(len(list(cases(plan))) for plan in able)
    program = mpi_jobs.PROGRAMS / "exchange_all.py"
    lines = mpi_jobs.run(mpi, size, program, progress, *able, PGASDL_MPI_WINDOWS=windows)
    assert lines == [f"checked {n_cases} cases"]


@cache
def exchanges(mpi: Row | None, size: int, **variables: str) -> dict[str, str]:
    """Digests of what every plan gives, the same on all ranks."""
    program = mpi_jobs.PROGRAMS / "exchange_digests.py"
    transport = "mpi" if mpi else "shm"
    lines = mpi_jobs.run(mpi, size, program, PGASDL_TRANSPORT=transport, **variables)
    used, digests = json.loads("".join(lines))
    assert used == transport
    return digests


@pytest.mark.parametrize(("size", "windows"), [(4, "allocated"), (3, "created")])
def test_every_plan_gives_the_bits_of_shm(mpi: Row, size: int, windows: str) -> None:
    found = exchanges(mpi, size, PGASDL_MPI_WINDOWS=windows)
    able = able_over(windows)
    assert {name.split()[0] for name in found} == able
    over_shm = exchanges(None, size).items()
    assert found == {case: bits for case, bits in over_shm if case.split()[0] in able}


@pytest.fixture(scope="module")
def digests_over_shm() -> list[str]:
    return digests(None, "shm")


def digests(mpi: Row | None, transport: str, *ways: str, **variables: str) -> list[str]:
    """Digests of the weights after each way of training, the same on both ranks."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    program = Path(mpi_jobs.TRAINING, "programs", "train_many.py")
    lines = mpi_jobs.run(
        mpi, 2, program, json.dumps([*(ways or WAYS)]), PGASDL_TRANSPORT=transport, **variables
    )
    assert len(lines) == 2
    assert lines[0] == lines[1]
    return json.loads(lines[0])


def test_the_training_app_to_the_bit(mpi: Row, digests_over_shm: list[str]) -> None:
    assert digests(mpi, "mpi") == digests_over_shm


@pytest.mark.parametrize("mpi", NEWEST, indirect=True)
def test_the_training_app_over_created_windows(mpi: Row, digests_over_shm: list[str]) -> None:
    found = digests(mpi, "mpi", WAYS[0], PGASDL_MPI_WINDOWS="created")
    assert found == digests_over_shm[:1]


@pytest.mark.parametrize("mpi", NEWEST, indirect=True)
def test_mpi_only_starts_the_ranks(mpi: Row, digests_over_shm: list[str]) -> None:
    assert digests(mpi, "shm", WAYS[0]) == digests_over_shm[:1]


@pytest.mark.parametrize("mpi", NEWEST, indirect=True)
def test_a_network_on_pictures_to_the_bit(mpi: Row) -> None:
    for package in ("torch", "safetensors", "skimage", "sklearn"):
        pytest.importorskip(package)
    program = APPS / "train_images.py"
    short = ("--iterations", "3", "--batch", "4")
    over_shm = mpi_jobs.run(None, 2, program, *short)
    over_mpi = mpi_jobs.run(mpi, 2, program, *short, PGASDL_TRANSPORT="mpi")
    bits = [[line for line in lines if "sha256" in line] for lines in (over_shm, over_mpi)]
    assert len(bits[0]) == 1 and bits[0] == bits[1]
