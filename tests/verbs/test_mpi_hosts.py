"""MPI's own launchers on two hosts with RDMA devices."""

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
SAID = "exact: shm to ranks [0, 1], verbs to ranks [2, 3] (shm inside a machine)"
SECONDS = 150  # of a job
SETTINGS = {
    "PGASDL_LOG": "warning",
    # Emulated hosts are slow: a slow rank is not a stopped one.
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


def test_verbs_carries(found: mpiexec.Mpiexec, tmp_path: Path) -> None:
    """MPI is only for meeting; tests/mpi/test_mpi_ways.py has hosts whose data it carries."""
    program = [sys.executable, "-u", str(JOINED), "shm shm verbs verbs"]
    output = told(found, [launch(found, program, SETTINGS)], tmp_path)
    assert [line for line in output.splitlines() if line.startswith("exact: ")] == [SAID], output
