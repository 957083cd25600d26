"""Fixtures of the tests of the job server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs_harness import Server


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Makes servers that are not started, and ends them with the test."""
    made: list[Server] = []

    def make(name: str = "server", **options: Any) -> Server:
        base = tmp_path / name
        base.mkdir()
        made.append(Server(base, **options))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def server(make_server: Callable[..., Server]) -> Server:
    """One that runs, with two slots."""
    found = make_server()
    found.start()
    return found


@pytest.fixture(scope="module")
def of_the_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that runs for all tests of a file, which do not end it."""
    found = Server(tmp_path_factory.mktemp("shared"))
    found.start()
    yield found
    found.close()


@pytest.fixture
def shared(of_the_file: Server) -> Iterator[Server]:
    """The same; jobs that a test leaves are stopped after it."""
    yield of_the_file
    of_the_file.stop_all()
