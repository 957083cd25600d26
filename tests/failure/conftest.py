"""Fixtures of the tests that kill, stop and interrupt ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from failure_harness import PROGRAMS
from support.forking import Job, Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One process that forks all ranks."""
    process = Zygote("numpy", "pgasdl.context", "pgasdl.loopback", "pgasdl.training.exchange")
    yield process
    process.close()


@pytest.fixture
def job(zygote: Zygote) -> Iterator[Callable[..., Job]]:
    """Starts jobs, and ends them with the test."""
    started: list[Job] = []

    def start(program: str, n: int, *arguments: object, **options: object) -> Job:
        beside: dict[str, Any] = {"folders": [PROGRAMS.parent], **options}
        started.append(Job(zygote, PROGRAMS / program, n, *arguments, **beside))
        return started[-1]

    yield start
    for each in started:
        each.close()
