"""Autotuning: the first iterations of training try plans, and the fastest stays. No barrier.

swCaffe tries two ways of a convolution in the first iterations and keeps the faster one, for each
layer. Here the ways are plans, and each bucket keeps its own. Exchange i of a bucket uses candidate
i modulo their number, on every rank. After some rounds the ranks exchange their times of the
bucket, which overlaps with one more round and ends in the last wait of that round. Then every rank
has all times, takes the slowest rank's for each candidate, and so makes the same choice.

No bucket waits for another. If a bucket's layers are frozen, or exchanged in some iterations only,
only its own choice is late.

The time of a bucket is that of its exchange, from its last gradient to its last flag, with the
other exchanges beside it: layers that are exchanged equally often all run the same candidate.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pgasdl import _native
from pgasdl.context import Context
from pgasdl.errors import PlanError
from pgasdl.group import Group, Steps
from pgasdl.plans import PLANS
from pgasdl.training.layout import Bucket, lay_out
from pgasdl.training.setup import Setup

log = logging.getLogger("pgasdl")

# The first round warms up pages, caches and connections; the fastest of the others counts.
ROUNDS = 4


def check_candidates(candidates: Sequence[str]) -> None:
    """Raise PlanError unless the candidates can take turns."""
    if len(set(candidates)) != len(candidates) or any(PLANS[n].phases > 1 for n in candidates):
        raise PlanError(f"candidates {list(candidates)}: different plans of a single phase")


@dataclass(frozen=True, slots=True)
class Tuned:
    """The buckets of an exchange whose plans a tuner chooses."""

    group: Group
    schedule: _native.LayerSchedule
    buckets: Sequence[Bucket]

    def keep(self, bucket: Bucket, candidate: int) -> None:
        """Run a bucket by one of its candidates from now on."""
        bucket.executions = [bucket.executions[candidate]]
        bucket.choices = [bucket.choices[candidate]]
        self.schedule.bind(bucket.index, bucket.executions)

    def executions(self, bucket: Bucket) -> int:
        """Return how often the exchange of a bucket is over."""
        return self.schedule.executions(bucket.layers[0])

    def seconds(self, bucket: Bucket) -> float:
        """Return how long its last exchange took."""
        _, _, began, ended, _ = self.schedule.timing(bucket.layers[0])
        return ended - began


class Autotune:
    """The candidates of one exchange, until each bucket has its plan. Making it is collective."""

    def __init__(
        self,
        context: Context,
        tuned: Tuned,
        candidates: Sequence[str],
        steps: Steps,
    ) -> None:
        self.candidates = tuple(candidates)
        self._tuned = tuned
        self._measured = len(candidates) * ROUNDS
        self.limit = self._measured + len(candidates)  # later exchanges run the chosen plan
        # Seconds of each exchange of each bucket; infinite where none were noted.
        self.times: list[list[float]] = [[] for _ in tuned.buckets]
        # Two threads may wait for one bucket.
        self._noting, self._deciding = threading.Lock(), threading.Lock()
        # The times travel like gradients, one layer for each bucket. A rank fills its own row, so
        # the sum has every rank's times.
        group = tuned.group
        shape = group.size, len(candidates)
        layers, buckets = lay_out([(shape, np.float32)] * len(tuned.buckets), 0)
        setup = Setup(context, group, "sum", None)
        for bucket in buckets:
            bucket.choices = setup.choices(bucket, ())
        parts = setup.parts(buckets, {}, rotate_root=False)
        memory = setup.allocate(buckets, parts, steps)
        setup.bind(parts, memory)
        self._segments = memory.segments
        self._of_ranks = [memory.gradients.numpy(np.float32, each.at, shape) for each in layers]
        self._exchanges = [bucket.executions[0] for bucket in buckets]
        self._told = [False] * len(buckets)
        self._undecided = set(range(len(buckets)))

    @property
    def settled(self) -> bool:
        """Whether every bucket has its plan; then this object is closed."""
        return not self._undecided

    def before(self, number: int) -> None:
        """Send the times of a bucket when it is time. Called before one of its layers is ready."""
        if number not in self._undecided:
            return
        over = self._tuned.executions(self._tuned.buckets[number])
        with self._noting:
            if over >= self._measured and not self._told[number]:
                self._told[number] = True
                self._note(number, self._measured)
                rounds = np.array(self.times[number], np.float32)
                best = rounds.reshape(ROUNDS, len(self.candidates))[1:].min(axis=0)
                self._of_ranks[number][self._tuned.group.rank] = best
                self._exchanges[number].start()
        if over >= self.limit:  # the last wait timed out, or was interrupted
            self._decide(number, None)

    def after(self, number: int, timeout: float | None) -> None:
        """Note the time of a bucket's exchange; choose a plan after the last. For each wait."""
        if number not in self._undecided:
            return
        over = self._tuned.executions(self._tuned.buckets[number])
        with self._noting:
            if self._note(number, min(over, self._measured)) and over <= self._measured:
                self.times[number][-1] = self._tuned.seconds(self._tuned.buckets[number])
        if over >= self.limit:
            self._decide(number, timeout)

    def _note(self, number: int, over: int) -> bool:
        """Make room for ``over`` times; True if there was none. Interrupted calls noted nothing."""
        times = self.times[number]
        missing = over - len(times)
        times += [math.inf] * missing
        return missing > 0

    def _decide(self, number: int, timeout: float | None) -> None:
        """Keep a bucket's fastest candidate: every rank has the same times."""
        with self._deciding:
            if number not in self._undecided:
                return
            self._exchanges[number].wait(timeout=timeout)
            slowest = self._of_ranks[number].max(axis=0)
            best = int(slowest.argmin())
            times = ", ".join(
                f"{name} {1e3 * each:.3f} ms"
                for name, each in zip(self.candidates, slowest, strict=True)
            )
            log.info("bucket %d: %s; kept %s", number, times, self.candidates[best])
            self._tuned.keep(self._tuned.buckets[number], best)
            self._undecided.remove(number)
            if self.settled:
                self.close()

    def close(self, *, idle: bool = True) -> None:
        """Release the memory of the measurement. Idempotent.

        While an exchange is under way, peers may still tell their times: ``idle`` is False.
        """
        idle = idle and all(each.idle for each in self._exchanges)
        for each in self._exchanges:
            each.close()
        # Peers that write by address may still write here: the memory then stays until the end.
        if idle or self._tuned.group.mapped:
            for segment in self._segments:
                segment.delete()
        self._segments = []
