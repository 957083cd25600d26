"""``apps/peers_bench.py mpi``: every size is measured, beside the library's own calls."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import mpi_jobs
import pytest
from support.mpi_rows import Row
from support.places import APPS
from tiers import full


@pytest.mark.parametrize("mpi", full(["mpich", "openmpi"], quick=1), indirect=True)
def test_bench_mpi(mpi: Row) -> None:
    words = ["mpi", "--sizes", "8,64K", "--repeat", "1", "--seconds", "0.002", "--json"]
    rows = json.loads(mpi_jobs.start(mpi, 2, APPS / "peers_bench.py", *words).stdout)
    assert {row["bytes"] for row in rows} == {8, 65536}
    assert {row["who"] for row in rows} == {
        "core", "python", "put by hand", "two-sided", "segment", "array", "MPI",
    }  # fmt: skip
    assert all(row["us"] > 0 for row in rows)


@pytest.mark.parametrize("mpi", full(["openmpi"]), indirect=True)
def test_the_kernel_copies_for_open_mpi(mpi: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(APPS))
    from bench.jobs import PEER_KINDS, Peer

    kind = PEER_KINDS["openmpi-cma"]
    environ = kind.environ | {
        "OMPI_MCA_smsc_base_verbose": "100",
        "OMPI_MCA_btl_base_verbose": "100",
    }
    peer = Peer("openmpi-cma", 2, replace(kind, environ=environ))
    try:
        assert len(peer.collective([1 << 20], 3, paced=True, fill_share=1.0)) == 3
        words = os.pread(peer._words.fileno(), 1 << 20, 0).decode()
    finally:
        peer.close()
    assert words.count("selected shared-memory single-copy component: cma") == 2
    assert "init of component sm returned success" in words
    assert "component tcp" not in words
