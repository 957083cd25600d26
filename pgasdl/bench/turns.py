"""Contenders take turns, round by round, so that a busy moment of the machine hits them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pgasdl.bench.timing import Moments, Samples, durations
from pgasdl.context import Context

_FEWEST, _MOST = 3, 2000
_PATIENCE = 600.0  # seconds a rank waits for rank 0, which measures the peers


@dataclass(slots=True)
class Contender:
    """Something to measure.

    Attributes
    ----------
    name : of the row, the floor's variant, or the peer's
    measure : makes so many calls, or batches of calls, and returns microseconds of each
    role : "ours" and "floor" are measured by all ranks together, a "peer" is asked by rank 0
    samples : of all rounds; a peer's are on rank 0 only
    """

    name: str
    role: str
    measure: Callable[[int], Sequence[float]]
    samples: Samples = field(default_factory=Samples)
    calls: int = _FEWEST


@dataclass(frozen=True, slots=True)
class Ranks:
    """Our ranks as the measurements see them."""

    context: Context
    paced: bool
    fill_share: float  # how many ranks' fillings one processor does

    def durations(self, moments: Moments, clock_ns: float, fill_ns: float) -> list[float]:
        """Microseconds of calls that all ranks made: the same list on every rank."""
        latest = self.latest(np.array(moments, np.int64))
        return durations(
            [int(moment) for moment in latest[0]], [int(moment) for moment in latest[1]],
            paced=self.paced, clock_ns=clock_ns, fill_ns=fill_ns * self.fill_share,
        )  # fmt: skip

    def latest(self, values: np.ndarray) -> np.ndarray:
        """The greatest of every rank's values."""
        return self.context.world.allreduce(values, "max", timeout=_PATIENCE)


def take_turns(
    ranks: Ranks, contenders: Sequence[Contender], rounds: int, seconds: float
) -> None:
    """Measure everybody ``rounds`` times, about ``seconds`` each time."""
    ours = [contender for contender in contenders if contender.role != "peer"]
    peers = [contender for contender in contenders if contender.role == "peer"]
    for contender in ours:
        contender.measure(_FEWEST)  # touches what is touched for the first time
        spent = ranks.latest(np.array([_seconds(contender)]))
        contender.calls = _calls(seconds, float(spent[0]))
    for contender in peers:
        contender.measure(_FEWEST)
        contender.calls = _calls(seconds, _seconds(contender))
    ranks.context.barrier(_PATIENCE)
    for _ in range(rounds):
        for contender in ours:
            contender.samples.values += contender.measure(contender.calls)
        for contender in peers:
            contender.samples.values += contender.measure(contender.calls)
        # Whoever does not measure sleeps here, in the kernel.
        ranks.context.barrier(_PATIENCE)


def _seconds(contender: Contender) -> float:
    began = time.perf_counter()
    contender.measure(_FEWEST)
    return (time.perf_counter() - began) / _FEWEST


def _calls(seconds: float, each: float) -> int:
    return max(_FEWEST, min(_MOST, int(seconds / max(each, 1e-7))))
