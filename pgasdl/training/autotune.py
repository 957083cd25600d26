"""Autotuning: the first iterations of training try plans, and the fastest stays. No barrier.

swCaffe tries two ways of a convolution in the first iterations and keeps the faster one, for each
layer. Here the ways are plans, and each bucket keeps its own. Iteration i uses candidate i modulo
their number, on every rank. After some rounds the ranks exchange their times of all buckets, which
overlaps with one more round. Then every rank has all times, takes the slowest rank's for each
candidate of a bucket, and so makes the same choice.

The time of a bucket is that of its exchange, from its last gradient to its last flag, with the
exchanges beside it: in one iteration all buckets run the same candidate.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pgasdl import _native
from pgasdl.collectives.state import Steps
from pgasdl.context import Context
from pgasdl.errors import PlanError
from pgasdl.group import Group
from pgasdl.plans import PLANS
from pgasdl.plans.algorithms.blocks import blocks, padded
from pgasdl.training.layout import Bucket, Layer

log = logging.getLogger("pgasdl")

# The first round warms up pages, caches and connections. The fastest of the others counts.
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
    layers: Sequence[Layer]
    buckets: Sequence[Bucket]

    def keep(self, bucket: Bucket, candidate: int) -> None:
        """Run a bucket by one of its candidates from now on."""
        if len(bucket.executions) > 1:
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

    @property
    def settled(self) -> bool:
        """Whether every bucket has its plan."""
        return all(len(bucket.executions) == 1 for bucket in self.buckets)


class Autotune:
    """The candidates of one exchange, until each bucket has its plan. Making it is collective.

    Attributes
    ----------
    candidates : tuple[str, ...]
        Names of plans.
    limit : int
        Iterations that try the candidates; later ones run the chosen plans.
    times : list[list[float]]
        Of each bucket, seconds of each exchange so far.
    settled : bool
        Every bucket has its plan, and this object is closed.
    """

    def __init__(
        self,
        context: Context,
        tuned: Tuned,
        candidates: Sequence[str],
        steps: Steps,
    ) -> None:
        self.candidates = tuple(candidates)
        self.settled = False
        self._tuned = tuned
        group = tuned.group
        self._measured = len(candidates) * ROUNDS
        self.limit = self._measured + len(candidates)
        self.times: list[list[float]] = [[] for _ in tuned.buckets]
        # One block for each rank: by bucket and candidate.
        self._shape = (len(tuned.buckets), len(candidates))
        of_rank = len(tuned.buckets) * len(candidates)
        count = group.size * padded(of_rank)

        self._segment = steps(
            lambda: context.segment(4 * count, notifications=0, group=group, timeout=steps.left)
        )
        times = self._segment.numpy(np.float32)
        self._of_ranks = [
            times[begin : begin + of_rank].reshape(self._shape)
            for begin, _ in blocks(count, group.size)
        ]
        self._handle = steps(
            lambda: context.collective_handle("all-gather", times, group=group, timeout=steps.left)
        )
        self._best: list[int] | None = None

    def after(self, number: int) -> None:
        """Note the time of a bucket's exchange. Called after each wait for one."""
        times, bucket = self.times[number], self._tuned.buckets[number]
        if self._tuned.executions(bucket) == len(times) or len(times) == self._measured:
            return
        times.append(self._tuned.seconds(bucket))
        if all(len(each) == self._measured for each in self.times):
            n_buckets, kinds = self._shape
            rounds = np.array(self.times, np.float32).reshape(n_buckets, ROUNDS, kinds)
            self._of_ranks[self._tuned.group.rank][...] = rounds[:, 1:].min(axis=1)
            self._handle.start()

    def before(self, number: int) -> None:
        """Give a bucket the chosen plan, if it is time. Called before a layer of it is ready."""
        bucket = self._tuned.buckets[number]
        if self._tuned.executions(bucket) < self.limit:
            return
        if self._best is None:
            self._best = self._fastest()
        self._tuned.keep(bucket, self._best[number])
        if self._tuned.settled:
            self.settled = True
            self.close()

    def close(self) -> None:
        """Give up the memory of the measurement."""
        self._handle.close()
        if not self._segment.deleted:
            self._segment.delete()

    def _fastest(self) -> list[int]:
        """Choose each bucket's fastest candidate: every rank has the same times."""
        self._handle.wait()
        slowest = np.max(self._of_ranks, axis=0)
        best = [int(candidate) for candidate in slowest.argmin(axis=1)]
        for bucket, candidate, seconds in zip(self._tuned.buckets, best, slowest, strict=True):
            times = ", ".join(
                f"{name} {1e3 * each:.3f} ms"
                for name, each in zip(self.candidates, seconds, strict=True)
            )
            log.info("bucket %d: %s; kept %s", bucket.index, times, self.candidates[candidate])
        return best
