"""Every test of this folder runs under each MPI; one that is missing is skipped by name."""

from __future__ import annotations

import importlib.util

import pytest

from pgasdl.errors import UnavailableError
from pgasdl.launch import mpiexec


@pytest.fixture(params=sorted(mpiexec.KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    """The MPI whose launcher and library the test runs with."""
    name: str = request.param
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip(f"{name}: no mpi4py ({mpiexec.INSTALL})")
    try:
        mpiexec.find(name)
    except UnavailableError as error:
        pytest.skip(f"{name}: {error}")
    return name
