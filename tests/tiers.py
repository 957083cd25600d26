"""Parameters of tests that only ``pytest --full`` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def full(values: Iterable[Any], quick: int = 0) -> list[Any]:
    """For ``parametrize``: all but the first ``quick`` values are marked `full`."""
    values = list(values)
    return values[:quick] + [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.full)
        for value in values[quick:]
    ]
