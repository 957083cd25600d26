"""Tests of memory on GPUs run in front of a fake CUDA driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import fake_driver
from support.environment import environment


@pytest.fixture(scope="session")
def fake() -> Callable[..., dict[str, str]]:
    """The environment of a process that finds the fake driver, with settings of it."""

    def make(**settings: object) -> dict[str, str]:
        return environment(**fake_driver.variables(**settings))

    make()
    return make
