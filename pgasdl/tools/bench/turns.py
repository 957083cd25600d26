"""Contenders take turns in each round, so that a busy moment of the machine hits them all."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pgasdl.context import Context
from pgasdl.tools.bench.timing import Moments, Samples, durations

_FEWEST, _MOST = 3, 2000
MIXED = "mixed"
PATIENCE = 600.0  # seconds a rank waits for rank 0, which may measure alone


@dataclass(slots=True)
class Contender:
    """A variant that is measured."""

    name: str  # name of the row, or of the floor's variant
    # Makes so many calls, or batches of calls, and returns the microseconds of each. Collective.
    measure: Callable[[int], Sequence[float]]
    calls: int = 0  # calls of a turn; 0: as many as fill it
    # Placement and microseconds of every turn.
    turns: list[tuple[str, Sequence[float]]] = field(default_factory=list)

    def samples(self, placement: str = MIXED) -> Samples:
        """Return the samples of a placement and of turns with mixed ones; MIXED: of all."""
        turns = [times for where, times in self.turns if placement in (where, MIXED)]
        return Samples([us for times in turns for us in times])


@dataclass(frozen=True, slots=True)
class Ranks:
    """Our ranks, as the measurements use them."""

    context: Context
    paced: bool
    fill_share: float  # ranks whose arrays one processor fills

    def durations(self, moments: Moments, clock_ns: float, fill_ns: float) -> list[float]:
        """Return the microseconds of calls that all ranks made, the same on every rank."""
        latest = self.latest(np.array(moments, np.int64))
        return durations(
            [int(moment) for moment in latest[0]],
            [int(moment) for moment in latest[1]],
            paced=self.paced,
            clock_ns=clock_ns,
            fill_ns=fill_ns * self.fill_share,
        )

    def latest(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the greatest of every rank's values."""
        return self.context.world.combine(values, "max", timeout=PATIENCE)


def take_turns(
    ranks: Ranks,
    contenders: Sequence[Contender],
    rounds: int,
    seconds: float,
    probe: Callable[[], str],
) -> None:
    """Measure each contender ``rounds`` times, about ``seconds`` each time.

    ``probe`` returns the placement, before and after every turn.
    """
    for contender in contenders:
        if contender.calls:
            continue
        contender.measure(_FEWEST)  # warms up
        began = time.perf_counter()
        contender.measure(_FEWEST)
        spent = ranks.latest(np.array([time.perf_counter() - began]))
        contender.calls = _calls(seconds, float(spent[0]) / _FEWEST)
    before = probe()
    for _ in range(rounds):
        for contender in contenders:
            gc.disable()
            times = contender.measure(contender.calls)
            gc.enable()
            after = probe()
            contender.turns.append((before if before == after else MIXED, times))
            before = after


def usual(contenders: Sequence[Contender]) -> str:
    """Return the placement in which all contenders have most samples; MIXED if there is none."""
    turns = [Counter(where for where, _ in one.turns) for one in contenders]
    common = {where: min(counts[where] for counts in turns) for where in turns[0]}
    common = {where: n for where, n in common.items() if n and where != MIXED}
    return max(common, key=lambda where: common[where], default=MIXED)


def best_of(contenders: Sequence[Contender], where: str) -> Contender:
    """Return the contender with the least median in a placement, in which some were measured."""
    measured = [one for one in contenders if one.samples(where).values]
    return min(measured, key=lambda one: one.samples(where).median)


def _calls(seconds: float, each: float) -> int:
    return max(_FEWEST, min(_MOST, int(seconds / max(each, 1e-7))))
