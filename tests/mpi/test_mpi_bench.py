"""``pgasdl bench mpi``: every size is measured, beside the library's own calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.environment import environment
from support.launcher import PGASDL
from support.mpi_rows import Row
from support.starting import succeeded
from tiers import full


@pytest.mark.parametrize("mpi", full(["mpich", "openmpi"], quick=1), indirect=True)
def test_bench_mpi(mpi: Row, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ["bench", "mpi", "--mpi", mpi.kind, "--sizes", "8,64K", "--repeat", "1"]
    words += ["--seconds", "0.002", "--json", str(file)]
    succeeded([*PGASDL, *words], env=environment(), timeout=120)
    rows = json.loads(file.read_text())
    assert {row["bytes"] for row in rows} == {8, 65536}
    assert {"allreduce, array", "two-sided"} <= {row["op"] for row in rows}
    assert all(row["us"] > 0 and row["peer_us"] > 0 for row in rows)
