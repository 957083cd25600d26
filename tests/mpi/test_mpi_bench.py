"""``pgasdl bench mpi``: every size is measured, beside the library's own calls."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from support.environment import environment
from support.launcher import PGASDL
from support.mpi_rows import Row
from support.starting import succeeded
from tiers import full

from pgasdl.tools.bench.peers import PEER_KINDS, Peer


@pytest.mark.parametrize("mpi", full(["mpich", "openmpi"], quick=1), indirect=True)
def test_bench_mpi(mpi: Row) -> None:
    words = ["bench", "mpi", "--mpi", mpi.kind, "--sizes", "8,64K", "--repeat", "1"]
    words += ["--seconds", "0.002", "--json"]
    rows = json.loads(succeeded([*PGASDL, *words], env=environment(), timeout=120))
    assert {row["bytes"] for row in rows} == {8, 65536}
    assert {"allreduce, array", "two-sided"} <= {row["op"] for row in rows}
    assert all(row["us"] > 0 and row["peer_us"] > 0 for row in rows)


@pytest.mark.parametrize("mpi", full(["openmpi"]), indirect=True)
def test_the_kernel_copies_for_open_mpi(mpi: Row) -> None:
    kind = PEER_KINDS["openmpi-cma"]
    environ = kind.environ | {
        "OMPI_MCA_smsc_base_verbose": "100",
        "OMPI_MCA_btl_base_verbose": "100",
    }
    peer = Peer("openmpi-cma", 2, replace(kind, environ=environ))
    try:
        assert len(peer.allreduce([1 << 20], 3, paced=True, fill_share=1.0)) == 3
        words = os.pread(peer._words.fileno(), 1 << 20, 0).decode()
    finally:
        peer.close()
    assert words.count("selected shared-memory single-copy component: cma") == 2
    assert "init of component sm returned success" in words
    assert "component tcp" not in words
