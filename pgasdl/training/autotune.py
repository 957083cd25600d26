"""Autotuning: plans are tried in the first iterations of training, the fastest stays. No barrier.

swCaffe tries two ways of a convolution in the first iterations and keeps the faster; here the ways
are plans. Iteration i uses candidate i modulo their number, on every rank, so nobody has to ask.
After some rounds each rank's times travel in an exchange of their own, which hides behind one more
round; by the next iteration every rank has all times, takes for each candidate the slowest rank's,
and so arrives at the same choice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pgasdl import _native
from pgasdl.collectives.resources import Steps
from pgasdl.context import Context
from pgasdl.errors import PlanError
from pgasdl.group import Group
from pgasdl.plans import PLANS
from pgasdl.plans.algorithms.blocks import blocks, padded
from pgasdl.training.layout import Bucket, Layer

log = logging.getLogger("pgasdl")

# The first warms up: pages, caches, connections. Of the others the fastest counts.
ROUNDS = 4


def check_candidates(candidates: Sequence[str]) -> None:
    """PlanError unless they can take turns."""
    if len(set(candidates)) != len(candidates) or any(PLANS[n].phases > 1 for n in candidates):
        raise PlanError(f"candidates {list(candidates)}: different plans of a single phase")


@dataclass(frozen=True, slots=True)
class Tuned:
    """The buckets of an exchange, whose plan a tuner settles."""

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
        """Every bucket has its plan."""
        return all(len(bucket.executions) == 1 for bucket in self.buckets)


class Autotune:
    """The candidates of one exchange, until one is chosen. Collective to make.

    Attributes
    ----------
    candidates : tuple[str, ...]
        Names of plans.
    limit : int
        Iterations that are made with them in turn; from this one on the chosen plan runs.
    settled : bool
        Every bucket has its plan, and this is closed.
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
        """Note the time if an iteration is over: a layer was waited for."""
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
        """Give the bucket of a layer that is about to be ready the chosen plan, if it is time."""
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
        """Give up what it was tried with."""
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
