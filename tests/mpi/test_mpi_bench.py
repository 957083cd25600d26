"""``pgasdl bench mpi``: every size is measured, beside the library's own calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mpi_jobs
import pytest
from support.mpi_rows import Row
from tiers import full


@pytest.mark.parametrize("mpi", full(["mpich", "openmpi"], quick=1), indirect=True)
def test_bench_mpi(mpi: Row, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, "-m", "pgasdl", "bench", "mpi", "--mpi", mpi.kind, "--sizes", "8,64K",
         "--repeat", "1", "--seconds", "0.002", "--json", str(file)],
        env=mpi_jobs.environment(), cwd="/", capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    assert {row["bytes"] for row in rows} == {8, 65536}
    assert {"allreduce, array", "two-sided"} <= {row["op"] for row in rows}
    assert all(row["us"] > 0 and row["peer_us"] > 0 for row in rows)
