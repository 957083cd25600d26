"""Autotuning: the first iterations of training try plans, and the fastest stays. No barrier.

swCaffe tries two ways of a convolution in the first iterations and keeps the faster one. Here the
ways are plans. Iteration i uses candidate i modulo their number, on every rank. After some rounds
the ranks exchange their times, which overlaps with one more round. Then every rank has all times,
takes the slowest rank's for each candidate, and so makes the same choice.
"""

from __future__ import annotations

import logging
import time
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
    """The buckets of an exchange whose plan a tuner chooses."""

    group: Group
    schedule: _native.LayerSchedule
    layers: Sequence[Layer]
    buckets: Sequence[Bucket]

    def keep(self, layer: int, candidate: int) -> None:
        """Run the bucket of ``layer`` by one of its candidates from now on."""
        bucket = self.buckets[self.layers[layer].bucket]
        if len(bucket.executions) > 1:
            bucket.executions = [bucket.executions[candidate]]
            bucket.choices = [bucket.choices[candidate]]
            self.schedule.bind(bucket.index, bucket.executions)

    @property
    def settled(self) -> bool:
        """Whether every bucket has its plan."""
        return all(len(bucket.executions) == 1 for bucket in self.buckets)


class Autotune:
    """The candidates of one exchange, until one is chosen. Making it is collective.

    Attributes
    ----------
    candidates : tuple[str, ...]
        Names of plans.
    limit : int
        Iterations that try the candidates; later ones run the chosen plan.
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
        self._times: list[float] = []
        self._last = 0.0
        # One block for each rank.
        count = group.size * padded(len(candidates))

        self._segment = steps(
            lambda: context.segment(4 * count, notifications=0, group=group, timeout=steps.left)
        )
        self._all = self._segment.numpy(np.float32)
        self._places = [begin for begin, _ in blocks(count, group.size)]
        self._handle = steps(
            lambda: context.collective_handle(
                "all-gather", self._all, group=group, timeout=steps.left
            )
        )
        self._best: int | None = None

    def after(self) -> None:
        """Note the time when an iteration is over. Called after each wait for a layer."""
        done = self._tuned.schedule.iterations()
        if done <= len(self._times) or done > self._measured:
            return
        now = time.monotonic()
        self._times.append(now - self._last)
        self._last = now
        if done == self._measured:
            kinds = len(self.candidates)
            mine = np.array(self._times[kinds:], np.float32).reshape(-1, kinds).min(axis=0)
            begin = self._places[self._tuned.group.rank]
            self._all[begin : begin + kinds] = mine
            self._handle.start()

    def before(self, layer: int) -> None:
        """Give a layer's bucket the chosen plan, if it is time. Called before it is ready."""
        tuned = self._tuned
        tuned.schedule.require(layer)
        if tuned.schedule.executions(layer) < self.limit:
            return
        if self._best is None:
            self._best = self._fastest()
        tuned.keep(layer, self._best)
        if tuned.settled:
            self.settled = True
            self.close()

    def close(self) -> None:
        """Give up the memory of the measurement."""
        self._handle.close()
        if not self._segment.deleted:
            self._segment.delete()

    def _fastest(self) -> int:
        """Choose the fastest candidate: every rank has the same times."""
        self._handle.wait()
        kinds = len(self.candidates)
        slowest = np.max([self._all[begin : begin + kinds] for begin in self._places], axis=0)
        best = int(np.argmin(slowest))
        times = ", ".join(
            f"{name} {1e3 * seconds:.3f} ms"
            for name, seconds in zip(self.candidates, slowest, strict=True)
        )
        log.info("tried plans, an iteration each: %s; kept %s", times, self.candidates[best])
        return best
