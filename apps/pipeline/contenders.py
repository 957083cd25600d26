"""Variants as they are measured: turns of several iterations, the exchange alone, a trace."""

from __future__ import annotations

import gc
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

import pgasdl
from pgasdl import _native
from pgasdl.tools.bench.peers import Peer
from pipeline.settings import Settings
from pipeline.trace import Recorder, Span

PATIENCE = 600.0  # seconds a rank waits for rank 0, which measures others
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
        """Record what happens in the ``with`` block."""

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
class Contender(ABC):
    """A variant that is measured by all ranks of pgasdl; every member is collective.

    Attributes
    ----------
    name, what, plan : str
        For the table.
    iterations, exchanges : list[float]
        Seconds, by round: of an iteration, and of its exchange alone.
    """

    ctx: pgasdl.Context
    name: str
    what: str
    plan: str = ""
    iterations: list[float] = field(default_factory=list)
    exchanges: list[float] = field(default_factory=list)

    def measure(self, iterations: int) -> None:
        """Take a turn."""
        self.iterations.append(latest(self.ctx, self._turn(iterations)))
        self.exchanges.append(latest(self.ctx, self._exchange()))

    @abstractmethod
    def trace(self, iterations: int) -> list[list[Span]]:
        """Return the spans of this process, by rank; a rank of another process has none."""

    def close(self) -> None:  # noqa: B027
        """Give the memory back."""

    @abstractmethod
    def _turn(self, iterations: int) -> float:
        """Return the seconds of an iteration."""

    @abstractmethod
    def _exchange(self) -> float:
        """Return the seconds of an exchange alone."""


@dataclass(slots=True)
class Ours(Contender):
    """In the processes of pgasdl's job. ``thread``: pgasdl's progress thread runs meanwhile."""

    local: Local | None = None  # None: another rank computes alone
    thread: bool = False

    def _turn(self, iterations: int) -> float:
        if self.local is None:
            return 0.0
        with Progress(self.ctx, self.thread):
            return self.local.turn(iterations)

    def _exchange(self) -> float:
        if self.local is None:
            return 0.0
        with Progress(self.ctx, self.thread):
            return self.local.exchange()

    def trace(self, iterations: int) -> list[list[Span]]:
        spans: list[list[Span]] = [[] for _ in range(self.ctx.size)]
        if self.local is not None:
            with Progress(self.ctx, self.thread):
                spans[self.ctx.rank] = self.local.trace(iterations)
        return spans

    def close(self) -> None:
        if self.local is not None:
            self.local.runner.close()


class Progress:
    """What ``pgasdl.init(progress="thread")`` does, for a ``with`` block."""

    def __init__(self, ctx: pgasdl.Context, thread: bool) -> None:
        self._ctx, self._thread = ctx, thread

    def __enter__(self) -> None:
        if self._thread:
            _native.progress_thread(self._ctx, True)

    def __exit__(self, *_: object) -> None:
        if self._thread:
            _native.progress_thread(self._ctx, False)


@dataclass(slots=True)
class Theirs(Contender):
    """In the processes of another job, which rank 0 asks; ``number``: of its contenders."""

    peer: Peer | None = None  # None: this is not rank 0
    number: int = 0

    def _turn(self, iterations: int) -> float:
        return max(self._ask(op="turn", iterations=iterations), default=0.0)

    def _exchange(self) -> float:
        return max(self._ask(op="exchange"), default=0.0)

    def trace(self, iterations: int) -> list[list[Span]]:
        answers = self._ask(op="trace", iterations=iterations)
        self.ctx.barrier(timeout=PATIENCE)
        return [[Span(*span) for span in spans] for spans in answers]

    def _ask(self, **command: Any) -> list[Any]:
        return self.peer.ask(number=self.number, **command) if self.peer else []


def theirs(
    ctx: pgasdl.Context, peer: Peer | None, number: int, settings: Settings, nbytes: int
) -> Theirs:
    """Make a contender in the peer's job."""
    made = Theirs(ctx, "", "", peer=peer, number=number)
    if peer:
        made.plan = peer.ask(op="make", settings=asdict(settings), nbytes=nbytes)[0]
    return made


def latest(ctx: pgasdl.Context, value: float) -> float:
    """Return the greatest of every rank's values."""
    return float(ctx.world.allreduce(np.array([value]), "max", timeout=PATIENCE)[0])
