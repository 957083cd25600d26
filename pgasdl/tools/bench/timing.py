"""From moments to figures. Our ranks and the peers use it, so it imports little."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Moments = tuple[list[int], list[int]]  # nanoseconds: each call's beginning and end


def timed(
    calls: int,
    fill: Callable[[int], object],
    sync: Callable[[], object] | None,
    call: Callable[[], object],
) -> Moments:
    """Make calls, each on new data. ``sync``, if given, lets all ranks begin at once."""
    clock = time.perf_counter_ns
    began, ended = [0] * calls, [0] * calls
    for number in range(calls):
        fill(number)
        if sync is not None:
            sync()
        before = clock()
        call()
        after = clock()
        began[number], ended[number] = before, after
    return began, ended


def together(
    call: Callable[[], object],
    sync: Callable[[], object],
    fill: Callable[[int], object] = lambda number: None,
) -> Callable[[int], list[float]]:
    """Return a function that measures calls on this rank, in microseconds.

    All ranks begin each call at once. One more call is made first: it reloads the caches after
    other contenders' turns.
    """

    def measure(calls: int) -> list[float]:
        moments = timed(calls + 1, fill, sync, call)
        return [(end - begin) / 1e3 for begin, end in zip(*moments, strict=True)][1:]

    return measure


def rounds_of(nbytes: int) -> int:
    """Return the round trips in one batch, which takes few microseconds; at least one."""
    return max(1, min(100, (1 << 18) // nbytes))


def batches(number: int, rounds: int, ping: Callable[[int], object]) -> list[float]:
    """Return the nanoseconds one way of each batch ``ping(rounds)`` of round trips."""
    clock = time.perf_counter_ns
    times = []
    for _ in range(number):
        before = clock()
        ping(rounds)
        times.append((clock() - before) / (2 * rounds))
    return times


def fill_cost(fill: Callable[[int], object]) -> int:
    """Return the nanoseconds of writing new data, where calls cannot be timed without it."""
    clock = time.perf_counter_ns
    times = []
    for number in range(5):
        before = clock()
        fill(number)
        times.append(clock() - before)
    return min(times)


def clock_cost() -> float:
    """Return the nanoseconds that two reads of the clock add to a call between them."""
    clock = time.perf_counter_ns
    costs = []
    for _ in range(101):
        before = clock()
        costs.append(clock() - before)
    return statistics.median(costs)


def durations(
    began: Sequence[int], ended: Sequence[int], *, paced: bool, clock_ns: float, fill_ns: float
) -> list[float]:
    """Return the microseconds of each call, from the latest rank's beginnings and ends.

    A paced call lasts from the last rank's beginning to the last rank's end. Ranks that share
    processors cannot begin at once: there the figure is the average of all calls, less the filling.
    """
    if paced:
        return [
            max(0.0, end - begin - clock_ns) / 1e3 for begin, end in zip(began, ended, strict=True)
        ]
    each = (ended[-1] - began[0] + fill_ns) / len(ended)
    return [max(0.0, each - fill_ns) / 1e3]


@dataclass(slots=True)
class Samples:
    """Microseconds of one contender, over all rounds."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The middle value, which tables show."""
        return statistics.median(self.values)

    @property
    def least(self) -> float:
        """The minimum, as on a quiet machine."""
        return min(self.values)

    @property
    def quartile(self) -> float:
        """The lower quartile, which other work on the machine hardly moves."""
        ordered = sorted(self.values)
        return ordered[len(ordered) // 4]

    @property
    def p90(self) -> float:
        """The ninth decile."""
        ordered = sorted(self.values)
        return ordered[min(len(ordered) - 1, (9 * len(ordered)) // 10)]
