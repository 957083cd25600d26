"""Which tests run: ``pytest`` runs the quick ones, ``pytest --full`` those marked `full`, too.

The quick ones together execute every module of the package (``.ci/run`` checks it). The tests
marked `full` cover more cases: further rows, sizes and mutants, long runs, guests.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked `full`, too")
    parser.addoption("--minutes", type=float, default=0.4, help="of each long run")
    parser.addoption(
        "--ranks-of-a-host", type=int, default=2, help="in the long run over verbs, on two hosts"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("full")]
