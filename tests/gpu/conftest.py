"""Tests of memory on GPUs run in front of a double of the CUDA driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import cuda_double
from support.environment import environment


@pytest.fixture(scope="session")
def double() -> Callable[..., dict[str, str]]:
    """The environment of a process that finds the double, with the double's settings in it."""

    def make(**settings: object) -> dict[str, str]:
        return environment(**cuda_double.variables(**settings))

    make()
    return make
