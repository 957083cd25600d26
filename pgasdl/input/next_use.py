"""When blocks of a data set are used next: the order of all batches is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pgasdl.input.batches import Batches, InOrder

Numbers = npt.NDArray[np.int64]
Blocks = tuple[Numbers, Numbers]

_BEHIND = 4  # iterations that a slower rank may be behind


class NextUse:
    """A function of a block: the next iteration, of this epoch or the next, that reads from it.

    This rank is at ``iteration``. ``blocks`` returns the first and the last block of each record;
    None: they are not known yet.
    """

    def __init__(self, batches: Batches | InOrder, blocks: Callable[[], Blocks | None]) -> None:
        self.iteration = 0
        self._batches = batches
        self._blocks = blocks
        self._kept: dict[int, Numbers] = {}

    def __call__(self, block: int) -> float:
        """Return the iteration; inf: not before the epoch after the next.

        0 while there is no index: the thread that makes the index may wait for this answer.
        """
        if self._blocks() is None:
            return 0.0
        span = self._batches.per_epoch
        now = max(self.iteration - _BEHIND, 0)
        for epoch in (now // span, now // span + 1):
            uses = self._uses(epoch)
            least = block * span + max(now - epoch * span, 0)
            at = int(np.searchsorted(uses, least))
            if at < len(uses) and uses[at] < (block + 1) * span:
                return epoch * span + int(uses[at]) % span
        return math.inf

    def mixed(self) -> float:
        """Return how many blocks the records come from at a time, on average over an epoch."""
        if (found := self._blocks()) is None:  # the order is that of the files
            return 1.0
        rows, (first, last) = self._rows(0), found
        _, begin = np.unique(first[rows], return_index=True)
        _, end = np.unique(first[rows[::-1]], return_index=True)
        spans = len(rows) - end - begin  # from its first record to its last
        longest = max(1, round((last - first + 1).mean()))  # blocks of a record
        return float(spans.sum() / len(rows) * longest)

    def _rows(self, epoch: int) -> Numbers:
        """Return the records of an epoch, in order."""
        span = self._batches.per_epoch
        return np.concatenate([self._batches.whole(epoch * span + k) for k in range(span)])

    def _uses(self, epoch: int) -> Numbers:
        """Return ``block * per_epoch + iteration`` of all uses in an epoch, sorted."""
        if (found := self._kept.get(epoch)) is None:
            span, batch = self._batches.per_epoch, self._batches.batch
            rows, blocks_of = self._rows(epoch), self._blocks()
            assert blocks_of is not None
            first, last = blocks_of[0][rows], blocks_of[1][rows]
            which = np.repeat(np.arange(span, dtype=np.int64), batch)
            n = last - first + 1
            begin = np.cumsum(n) - n
            blocks = np.repeat(first - begin, n) + np.arange(n.sum())
            found = np.unique(blocks * span + np.repeat(which, n))
            self._kept = {k: v for k, v in self._kept.items() if k == epoch - 1}
            self._kept[epoch] = found
        return found
