"""MPI's own launchers on two hosts: whatever joins the ranks and carries their data."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import hosts
import pytest
import rig
from support import digits
from support.mpi_rows import across
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
SECONDS = 150  # of a job
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


def launch(
    found: mpiexec.Mpiexec, program: Sequence[str], variables: Mapping[str, str], of_a_host: int = 2
) -> str:
    """A line of a shell that runs a job of the launcher's, and keeps the status if it fails."""
    given = [f"{key}={value}" for key, value in variables.items()]
    handed = ["PYTHONPATH", *found.environ(), *variables]
    both = [f"{address}:{of_a_host}" for address in hosts.ADDRESSES]
    line = [*across(found, both, hosts.FAR, "vec0", handed), *program]
    return f"timeout {SECONDS} {shlex.join(['env', *given, *line])} || status=$?"


def told(found: mpiexec.Mpiexec, lines: Sequence[str], folder: Path) -> str:
    """The output of a script on the first host, whose jobs all ended well."""
    env = {"PYTHONPATH": str(INSTALLED), "MAILBOX": str(folder), "OMP_NUM_THREADS": "1"}
    script = "\n".join([*lines, f"touch {folder}/end", "exit ${status:-0}"])
    first, _ = rig.run_pair(
        (script, f"{hosts.FAR} serve"),
        env=env | found.environ(),
        writable=[folder],
        timeout=400,
    )
    return first.check().output


def test_training(found: mpiexec.Mpiexec, tmp_path: Path) -> None:
    """The training app, whose ranks meet at rank 0's store, ends with the bits of shm."""
    saved, secret = tmp_path / "weights.npz", tmp_path / "secret"
    secret.touch(0o600)
    secret.write_bytes(os.urandom(32))
    program = [sys.executable, "-u", *digits.training(saved)]
    variables = SETTINGS | {"PGASDL_LOG": "info", "PGASDL_SECRET_FILE": str(secret)}
    output = told(found, [launch(found, program, variables, of_a_host=1)], tmp_path)
    assert "the same bits on 2 ranks" in output, output
    assert "shm to ranks [0], verbs to ranks [1]" in output, output
    digits.require_same(2, saved)


def test_every_way(found: mpiexec.Mpiexec, tmp_path: Path) -> None:
    """MPI only for meeting, windows of both kinds, and MPI where a host has no RDMA device."""
    ways = DONE[found.kind]
    lines = []
    for name in ways:
        more, routes = WAYS[name]
        parts = "all" if (found.kind, name) in ALL else "some"
        if name == "no device":
            lines.append("rdma link delete rxe0")
        program = [sys.executable, "-u", str(JOINED), parts, routes]
        lines += [f"echo way {name}", launch(found, program, SETTINGS | more)]
    output = told(found, lines, tmp_path)
    said = [line for line in output.splitlines() if line.startswith(("way ", "exact: "))]
    assert said == [line for name in ways for line in (f"way {name}", SAID[name])], output
