"""Fixtures of the contract suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contract_pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The session's worker processes, killed and reaped at its end."""
    workers = Pool()
    yield workers
    workers.close()
