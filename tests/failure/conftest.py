"""Fixtures of the tests that kill, stop and interrupt ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import pytest
from failure_harness import DETECTIONS, Job, Zygote


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How fast kills were noticed."""
    if DETECTIONS:
        times = sorted(seconds for seconds, _ in DETECTIONS)
        worst = max(DETECTIONS)
        late = sum(seconds > 0.25 for seconds in times)
        terminalreporter.write_line(
            f"kill -9 to a survivor's error, {len(times)} times: median "
            f"{statistics.median(times) * 1e3:.1f} ms, 99 % within "
            f"{times[int(0.99 * (len(times) - 1))] * 1e3:.1f} ms, longest {worst[0] * 1e3:.0f} ms "
            f"({worst[1]}); {late} over 250 ms"
        )
