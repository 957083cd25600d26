"""MPI between two hosts that have no RDMA device: windows of both kinds, and the default."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from support import two_hosts
from support.mpi_rows import ROWS, Row, across
from support.places import TESTS

JOINED = TESTS / "verbs/programs/joined.py"
ASKED = ({"PGASDL_TRANSPORT": "mpi"}, "mpi to all ranks (asked for)")
# The variables of a job of 4 ranks, and what it says of its routes.
WAYS = {
    "allocated": ASKED,
    "created": (ASKED[0] | {"PGASDL_MPI_WINDOWS": "created"}, ASKED[1]),
    "default": (
        {},
        "mpi to all ranks (several machines, joined through MPI; rank 0 has no verbs: no RDMA "
        "device)",
    ),
}
SETTINGS = {
    "PGASDL_LOG": "warning",
    # Heartbeats wait for MPI: a slow rank is not a stopped one.
    "PGASDL_STOPPED_AFTER": "20",
    "PGASDL_STORE": "node1:29500",
    "UCX_TLS": "tcp,sm,self",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
}


# Debian's Open MPI 4.1 has no windows between hosts for programs with threads, but by UCX.
@pytest.mark.full
@pytest.mark.parametrize("mpi", [name for name in ROWS if name != "debian_openmpi"], indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_every_way(mpi: Row, way: str, tmp_path: Path) -> None:
    two_hosts.require()
    more, said = WAYS[way]
    found = mpi.found()
    variables = mpi.environ(found.environ() | SETTINGS | more)
    handed = ["PYTHONPATH", "PATH", "PGASDL_SECRET_FILE", *variables]
    nodes = ["node1:2", "node2:2"]
    line = across(found, nodes, two_hosts.shell(tmp_path), "cable", handed)
    line += ["python3", str(JOINED), "mpi mpi mpi mpi"]
    script = f"export -f on\n{shlex.join(line)}"
    told = two_hosts.succeeded(tmp_path, script, apart=True, **variables)
    assert told.splitlines() == [f"exact: {said}"]
