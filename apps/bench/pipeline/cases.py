"""Variants at work: turns of several iterations, the exchange alone, a trace."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

import pgasdl
from bench.jobs import Peer
from bench.timeline import Recorder, Span
from pgasdl import _native
from pgasdl.tools.bench.turns import PATIENCE, Contender

_EXCHANGES = 3


class Runner(Protocol):
    """How iterations of a variant run on this rank."""

    recorder: Recorder
    plan: str

    def iterate(self) -> None:
        """Make one iteration; exchanges may still be under way when it returns."""

    def drain(self) -> None:
        """Let everything end."""

    def exchange(self) -> float:
        """Return the seconds of one exchange alone."""

    def recording(self) -> AbstractContextManager[None]:
        """Record spans in the ``with`` block."""

    def close(self) -> None:
        """Give the memory back."""


class Local:
    """A runner of this process; every member is collective in its job."""

    def __init__(self, runner: Runner, barrier: Callable[[], None]) -> None:
        self.runner, self._barrier = runner, barrier

    def turn(self, iterations: int) -> float:
        """Return the seconds of one iteration among others.

        The first is not counted, and the last one's exchanges end after the count, as those of the
        first end in it.
        """
        runner = self.runner
        gc.disable()
        self._barrier()
        runner.iterate()
        began = time.monotonic()
        for _ in range(iterations):
            runner.iterate()
        seconds = (time.monotonic() - began) / iterations
        runner.drain()
        gc.enable()
        return seconds

    def exchange(self) -> float:
        """Return the seconds of an exchange alone."""
        return statistics.median(self.runner.exchange() for _ in range(_EXCHANGES))

    def trace(self, iterations: int) -> list[Span]:
        """Record iterations, behind one that is not recorded."""
        self._barrier()
        self.runner.iterate()
        with self.runner.recording():
            for _ in range(iterations):
                self.runner.iterate()
            self.runner.drain()
        return self.runner.recorder.take()


@dataclass(slots=True)
class Case(ABC):
    """A variant at work; every member is collective."""

    ctx: pgasdl.Context
    # For the table.
    name: str
    what: str
    plan: str = ""
    # An iteration among others, and its exchange alone.
    iteration: Contender = field(init=False)
    exchanging: Contender = field(init=False)

    def __post_init__(self) -> None:
        self.iteration = Contender(self.name, lambda calls: self._latest(self.turn(calls)))
        self.exchanging = Contender(self.name, lambda _: self._latest(self.exchange()), calls=1)

    def _latest(self, seconds: float) -> list[float]:
        return [1e6 * latest(self.ctx, seconds)]

    @abstractmethod
    def turn(self, iterations: int) -> float:
        """Return the seconds of an iteration on this rank."""

    @abstractmethod
    def exchange(self) -> float:
        """Return the seconds of an exchange alone on this rank."""

    @abstractmethod
    def trace(self, iterations: int) -> list[list[Span]]:
        """Return the spans of this process, by rank; a rank of another process has none."""

    def close(self) -> None:  # noqa: B027
        """Give the memory back."""


@dataclass(slots=True)
class Ours(Case):
    """In the processes of pgasdl's job. ``thread``: pgasdl's progress thread runs meanwhile."""

    local: Local | None = None  # None: another rank computes alone
    thread: bool = False

    def turn(self, iterations: int) -> float:
        if self.local is None:
            return 0.0
        with self._progress():
            return self.local.turn(iterations)

    def exchange(self) -> float:
        if self.local is None:
            return 0.0
        with self._progress():
            return self.local.exchange()

    def trace(self, iterations: int) -> list[list[Span]]:
        spans: list[list[Span]] = [[] for _ in range(self.ctx.size)]
        if self.local is not None:
            with self._progress():
                spans[self.ctx.rank] = self.local.trace(iterations)
        return spans

    @contextlib.contextmanager
    def _progress(self) -> Iterator[None]:
        """Do what ``pgasdl.init(progress="thread")`` does, in a ``with`` block."""
        if self.thread:
            _native.progress_thread(self.ctx, True)
        try:
            yield
        finally:
            if self.thread:
                _native.progress_thread(self.ctx, False)

    def close(self) -> None:
        if self.local is not None:
            self.local.runner.close()


@dataclass(slots=True)
class Theirs(Case):
    """In the processes of another job, which rank 0 asks; ``number``: of its cases."""

    peer: Peer | None = None  # None: this is not rank 0
    number: int = 0

    def turn(self, iterations: int) -> float:
        return max(self._ask(op="turn", iterations=iterations), default=0.0)

    def exchange(self) -> float:
        return max(self._ask(op="exchange"), default=0.0)

    def trace(self, iterations: int) -> list[list[Span]]:
        answers = self._ask(op="trace", iterations=iterations)
        self.ctx.barrier(timeout=PATIENCE)
        return [[Span(*span) for span in spans] for spans in answers]

    def _ask(self, **command: Any) -> list[Any]:
        return self.peer.ask(number=self.number, **command) if self.peer else []


def latest(ctx: pgasdl.Context, value: float) -> float:
    """Return the greatest of every rank's values."""
    return float(ctx.world.combine(np.array([value]), "max", timeout=PATIENCE)[0])
