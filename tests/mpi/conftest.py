"""Tests of this folder run under each MPI, without --full under one; a missing MPI is skipped."""

from __future__ import annotations

import pytest
from support.mpi_rows import ROWS, Row, missing
from tiers import full


@pytest.fixture(params=full(ROWS, quick=1))
def mpi(request: pytest.FixtureRequest) -> Row:
    """The MPI whose launcher and library the test runs with."""
    if why := missing(request.param):
        pytest.skip(f"{request.param}: {why}")
    return ROWS[request.param]
