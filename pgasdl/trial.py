"""Trying plans in the first iterations of training, and keeping the fastest. No barrier.

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
from typing import TYPE_CHECKING

import numpy as np

from pgasdl.errors import PlanError
from pgasdl.plans import PLANS
from pgasdl.plans.blocks import blocks, padded

if TYPE_CHECKING:
    from pgasdl.exchange import GradientExchange

log = logging.getLogger("pgasdl")

# The first warms up: pages, caches, connections. Of the others the fastest counts.
ROUNDS = 4


class Trial:
    """The candidates of one exchange, until one is chosen. Collective to make.

    Attributes
    ----------
    candidates : names of plans
    limit : iterations that are made with them in turn; from this one on the chosen plan runs
    """

    def __init__(
        self, exchange: GradientExchange, candidates: Sequence[str], timeout: float | None
    ) -> None:
        if len(set(candidates)) != len(candidates) or any(PLANS[n].phases > 1 for n in candidates):
            raise PlanError(f"candidates {list(candidates)}: different plans of a single phase")
        self.candidates = tuple(candidates)
        self._exchange = exchange
        group = exchange.group
        self._measured = len(candidates) * ROUNDS
        self.limit = self._measured + len(candidates)
        self._times: list[float] = []
        self._last = 0.0
        # One block for each rank.
        count = group.size * padded(len(candidates))
        self._segment = exchange.context.segment(
            4 * count, notifications=0, group=group, timeout=timeout
        )
        self._all = self._segment.numpy(np.float32)
        self._places = [begin for begin, _ in blocks(count, group.size)]
        self._handle = exchange.context.collective_handle(
            "all-gather", self._all, group=group, timeout=timeout
        )
        self._best: int | None = None
        self._settled: set[int] = set()

    def after(self) -> None:
        """A layer was waited for: note the time if an iteration is over."""
        done = self._exchange._schedule.iterations()
        if done <= len(self._times) or done > self._measured:
            return
        now = time.monotonic()
        self._times.append(now - self._last)
        self._last = now
        if done == self._measured:
            kinds = len(self.candidates)
            mine = np.array(self._times[kinds:], np.float32).reshape(-1, kinds).min(axis=0)
            begin = self._places[self._exchange.group.rank]
            self._all[begin : begin + kinds] = mine
            self._handle.start()

    def before(self, layer: int) -> None:
        """A layer is about to be ready: give its bucket the chosen plan, if it is time."""
        exchange = self._exchange
        exchange._schedule.require(layer)
        if exchange._schedule.executions(layer) < self.limit:
            return
        if self._best is None:
            self._best = self._choose()
        bucket = exchange._buckets[exchange.layers[layer].bucket]
        if bucket.index not in self._settled:
            bucket.bound = [bucket.bound[self._best]]
            exchange._schedule.bind(bucket.index, bucket.bound)
            exchange._chosen[bucket.index] = [exchange._chosen[bucket.index][self._best]]
            self._settled.add(bucket.index)
        if len(self._settled) == len(exchange._buckets):
            exchange._trial = None
            self._segment.delete()

    def _choose(self) -> int:
        """Number of the fastest candidate: every rank has the same times."""
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
