"""Fixtures of the tests that kill, stop and interrupt ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from failure_harness import Job, Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One process that forks all ranks."""
    process = Zygote()
    yield process
    process.close()


@pytest.fixture
def job(zygote: Zygote) -> Iterator[Callable[..., Job]]:
    """Starts jobs, and ends them with the test."""
    started: list[Job] = []

    def start(program: str, n: int, *arguments: object, **options: object) -> Job:
        started.append(Job(zygote, program, n, *arguments, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        each.close()
