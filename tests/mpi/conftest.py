"""Every test of this folder runs under each MPI; one that is missing is skipped by name."""

from __future__ import annotations

import pytest
from mpi_rows import ROWS, Row, missing


@pytest.fixture(params=list(ROWS))
def mpi(request: pytest.FixtureRequest) -> Row:
    """The MPI whose launcher and library the test runs with."""
    if why := missing(request.param):
        pytest.skip(f"{request.param}: {why}")
    return ROWS[request.param]
