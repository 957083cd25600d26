"""Fixtures of the tests of transport tcp."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.forking import Job, Zygote
from support.places import TESTS

PROGRAMS = (TESTS / "failure/programs", TESTS / "tcp/programs")


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One process that forks all ranks."""
    process = Zygote("numpy", "pgasdl.context", "pgasdl.training.exchange")
    yield process
    process.close()


@pytest.fixture
def job(zygote: Zygote) -> Iterator[Callable[..., Job]]:
    """Starts jobs over tcp, and ends them with the test."""
    started: list[Job] = []

    def start(program: str, n: int, *arguments: object, **variables: str) -> Job:
        settings = {"PGASDL_TRANSPORT": "tcp", "PGASDL_TIMEOUT": "60"} | variables
        file = next(folder / program for folder in PROGRAMS if (folder / program).exists())
        folders = (*PROGRAMS, TESTS)
        started.append(Job(zygote, file, n, *arguments, folders=folders, **settings))
        return started[-1]

    yield start
    for each in started:
        each.close()
