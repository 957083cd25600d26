"""Contenders take turns in each round, so that a busy moment of the machine hits them all."""

from __future__ import annotations

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
_PATIENCE = 600.0  # seconds a rank waits for rank 0, which measures the peers


@dataclass(slots=True)
class Contender:
    """Something to measure.

    Attributes
    ----------
    name : str
        Name of the row, of the floor's variant, or of the peer.
    role : str
        All ranks measure "ours" and "floor" together; rank 0 asks a "peer".
    measure : Callable[[int], Sequence[float]]
        Makes so many calls, or batches of calls, and returns the microseconds of each.
    turns : list[tuple[str, Sequence[float]]]
        Placement and microseconds of every turn; only rank 0 has those of a peer.
    """

    name: str
    role: str
    measure: Callable[[int], Sequence[float]]
    turns: list[tuple[str, Sequence[float]]] = field(default_factory=list)
    calls: int = _FEWEST

    def samples(self, placement: str) -> Samples:
        """Return the samples of a placement, and of turns with mixed ones; may be empty."""
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
        return self.context.world.allreduce(values, "max", timeout=_PATIENCE)


@dataclass(frozen=True, slots=True)
class Procedure:
    """How contenders are measured.

    Attributes
    ----------
    ranks : Ranks
        The ranks that measure together.
    sync : Callable[[], None]
        Lets all ranks begin at once.
    rounds, seconds
        Turns of each contender, and the length of one, about.
    """

    ranks: Ranks
    sync: Callable[[], None]
    rounds: int
    seconds: float

    def take_turns(self, contenders: Sequence[Contender], *, longer: int = 1) -> None:
        """Measure the contenders, in ``longer`` times as many rounds."""
        take_turns(self.ranks, contenders, longer * self.rounds, self.seconds, lambda: "")


def take_turns(
    ranks: Ranks,
    contenders: Sequence[Contender],
    rounds: int,
    seconds: float,
    probe: Callable[[], str],
) -> None:
    """Measure each contender ``rounds`` times, about ``seconds`` each time.

    ``probe`` tells the placement before and after every turn.
    """
    ours = [contender for contender in contenders if contender.role != "peer"]
    peers = [contender for contender in contenders if contender.role == "peer"]
    # Only rank 0 knows the peers; the others sleep meanwhile, in the kernel.
    n_peers = int(ranks.latest(np.array([len(peers)]))[0])
    peers += [_idle() for _ in range(n_peers - len(peers))]
    for contender in ours + peers:
        contender.measure(_FEWEST)  # warms up
        began = time.perf_counter()
        contender.measure(_FEWEST)
        spent = ranks.latest(np.array([time.perf_counter() - began]))
        contender.calls = _calls(seconds, float(spent[0]) / _FEWEST)
    before = probe()
    for _ in range(rounds):
        for contender in ours + peers:
            times = contender.measure(contender.calls)
            if contender.role == "peer":
                ranks.context.barrier(timeout=_PATIENCE)
            after = probe()
            contender.turns.append((before if before == after else MIXED, times))
            before = after


def usual(contenders: Sequence[Contender]) -> str:
    """Return the placement in which all were measured most often; MIXED if there is none."""
    turns = [Counter(where for where, _ in one.turns) for one in contenders]
    common = {where: min(counts[where] for counts in turns) for where in turns[0]}
    common = {where: n for where, n in common.items() if n and where != MIXED}
    return max(common, key=lambda where: common[where], default=MIXED)


def _idle() -> Contender:
    return Contender("idle", "peer", lambda calls: [])


def _calls(seconds: float, each: float) -> int:
    return max(_FEWEST, min(_MOST, int(seconds / max(each, 1e-7))))
