"""Parameters of tests that only the gate or only ``pytest --full`` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def full(values: Iterable[Any], quick: int = 0) -> list[Any]:
    """For ``parametrize``: all but the first ``quick`` values are marked `full`."""
    values = list(values)
    return values[:quick] + _marked(values[quick:], pytest.mark.full)


def gate(values: Iterable[Any]) -> list[Any]:
    """For ``parametrize``: these values are marked `gate`."""
    return _marked(values, pytest.mark.gate)


def _marked(values: Iterable[Any], mark: pytest.MarkDecorator) -> list[Any]:
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
        for value in values
    ]
