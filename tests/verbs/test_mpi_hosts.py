"""MPI's own launchers, two hosts of two ranks: ranks meet through MPI, whatever carries data."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path

import hosts
import pytest
import rig
from support.places import INSTALLED

from pgasdl.errors import UnavailableError
from pgasdl.runtime.launch import mpiexec

pytestmark = pytest.mark.full

JOINED = hosts.PROGRAMS / "joined.py"
# The variables of a job of 4 ranks, and rank 0's routes.
WAYS = {
    "verbs": ({}, "shm shm verbs verbs"),
    "allocated": ({"PGASDL_TRANSPORT": "mpi"}, "mpi mpi mpi mpi"),
    "created": (
        {"PGASDL_TRANSPORT": "mpi", "PGASDL_MPI_WINDOWS": "created"},
        "mpi mpi mpi mpi",
    ),
    "no device": ({}, "mpi mpi mpi mpi"),
}
# Windows of Open MPI (5.0.11) take tens of milliseconds for an operation between these hosts.
DONE = {"mpich": [*WAYS], "openmpi": ["verbs", "no device"]}
ALL = [("mpich", "verbs"), ("mpich", "allocated"), ("openmpi", "verbs")]  # run all operations
SAID = {
    "verbs": "exact: shm to ranks [0, 1], verbs to ranks [2, 3] (shm inside a machine)",
    "allocated": "exact: mpi to all ranks (asked for)",
    "created": "exact: mpi to all ranks (asked for)",
    "no device": "exact: mpi to all ranks (several machines, joined through MPI; rank 0 has no "
    "verbs: no RDMA device)",
}
SETTINGS = {
    "PGASDL_LOG": "warning",
    # Heartbeats wait for MPI by TCP between emulated hosts: a slow rank is not a stopped one.
    "PGASDL_STOPPED_AFTER": "20",
    # By default rank 0's store takes the address of the default route, which does not exist here.
    "PGASDL_STORE": f"{hosts.ADDRESSES[0]}:29500",
    # MPI by TCP: UCX does not work as it should over soft-RoCE.
    "UCX_TLS": "tcp,sm,self",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
}


@pytest.fixture(params=sorted(mpiexec.LAUNCHERS))
def found(request: pytest.FixtureRequest) -> mpiexec.Mpiexec:
    """Each MPI; one that is missing is skipped by name."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip(f"{request.param}: no mpi4py ({mpiexec.INSTALL})")
    try:
        return mpiexec.find(request.param)
    except UnavailableError as error:
        pytest.skip(f"{request.param}: {error}")


def across(found: mpiexec.Mpiexec, names: list[str]) -> list[str]:
    """The launcher and its options: two ranks on each host, far.sh in place of ssh.

    ``names`` : of variables that the ranks must get; hydra passes all on
    """
    both = ",".join(f"{address}:2" for address in hosts.ADDRESSES)
    if found.kind == "mpich":
        remote = ["-launcher", "ssh", "-launcher-exec", str(hosts.FAR), "-iface", "vec0"]
        return [found.program, *remote, "-hosts", both, "-n", "4"]
    prefix = str(Path(found.program).parents[1])
    far = str(hosts.FAR)
    remote = ["--prtemca", "plm_ssh_agent", far, "--prtemca", "oob_tcp_if_include", "vec0"]
    handed = [word for name in names for word in ("-x", name)]
    first, *options = found.command(4, [])
    return [first, "--prefix", prefix, *remote, "--host", both, *handed, *options]


def test_every_way(found: mpiexec.Mpiexec, tmp_path: Path) -> None:
    """MPI only for meeting, windows of both kinds, and MPI where a host has no RDMA device."""
    ways = DONE[found.kind]
    lines = []
    for name in ways:
        more, routes = WAYS[name]
        parts = "all" if (found.kind, name) in ALL else "some"
        if name == "no device":
            lines.append("rdma link delete rxe0")
        variables = SETTINGS | more
        program = [sys.executable, "-u", str(JOINED), parts, routes]
        line = [*across(found, ["PYTHONPATH", *found.environ(), *variables]), *program]
        given = [f"{key}={value}" for key, value in variables.items()]
        lines += [
            f"echo way {name}",
            f"timeout 100 {shlex.join(['env', *given, *line])} || status=$?",
        ]
    lines += [f"touch {tmp_path}/end", "exit ${status:-0}"]
    env = {"PYTHONPATH": str(INSTALLED), "MAILBOX": str(tmp_path), "OMP_NUM_THREADS": "1"}
    first, _ = rig.run_pair(
        ("\n".join(lines), f"{hosts.FAR} serve"),
        env=env | found.environ(),
        writable=[tmp_path],
        timeout=400,
    )
    first.check()
    said = [line for line in first.output.splitlines() if line.startswith(("way ", "exact: "))]
    assert said == [line for name in ways for line in (f"way {name}", SAID[name])], first.output
