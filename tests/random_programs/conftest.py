"""``pytest tests/random_programs --seeds 0:100000`` runs as many programs as are wanted."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", help="FROM:TO, of random programs over loopback and shm")
