"""Which records each rank reads in each iteration: a function of seed and iteration alone."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


class Batches:
    """The same global batches for any number of ranks, and this rank's part of each.

    Iterations are counted from the beginning of training: iteration k is batch
    ``k % per_epoch`` of pass ``k // per_epoch`` over the data. Nothing is remembered from one
    iteration to the next, so training resumes at any of them, on any number of ranks.

    Parameters
    ----------
    n_records : int
        Records of the data set, at least 1.
    batch : int
        Records of a global batch, at least ``size``. Parts of ranks differ by at most one record:
        a mean over ranks is the mean over the batch where ``size`` divides ``batch``; else divide
        each rank's sum by ``batch / size``.
    rank, size : int
        This rank, and how many there are.
    seed : int, optional
        0 <= seed: every epoch has another order. None: always the order of the files.
    last : str, default "drop"
        The use of the records that are left over at the end of an epoch, fewer than a batch.
        "drop": they are left out of this epoch. "fill": records from the beginning of the epoch's
        order complete their batch.
    chunks : array of int, optional
        The chunk of each record, such as its file. An epoch then takes ``mix`` chunks at a time,
        at random, and mixes their records: a cache that holds so many chunks reads each once.
    mix : int, default 16
        How many chunks.

    Attributes
    ----------
    per_epoch : int
        Batches of an epoch, the same for every rank.

    Raises
    ------
    ValueError
        No record, no such rank, a batch with fewer records than ranks, "drop" would leave no
        batch, or not a chunk for each record.

    Notes
    -----
    The order comes from NumPy's RandomState, whose numbers are the same in every version. It takes
    8 bytes a record, and is made anew once an epoch.
    """

    def __init__(
        self,
        n_records: int,
        batch: int,
        *,
        rank: int = 0,
        size: int = 1,
        seed: int | None = 0,
        last: Literal["drop", "fill"] = "drop",
        chunks: npt.ArrayLike | None = None,
        mix: int = 16,
    ) -> None:
        if n_records < 1:
            raise ValueError(f"{n_records} records: at least 1")
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}: ranks are 0 to size - 1")
        if batch < size:
            raise ValueError(f"a batch of {batch}: at least one record for each of {size} ranks")
        if seed is not None and operator.index(seed) < 0:
            raise ValueError(f"seed {seed}: at least 0")
        if last not in ("drop", "fill"):
            raise ValueError(f'last={last!r}: there are "drop" and "fill"')
        if chunks is not None and np.shape(chunks) != (n_records,):
            raise ValueError(f"chunks of shape {np.shape(chunks)}: one for each of {n_records}")
        if mix < 1:
            raise ValueError(f"mix {mix}: at least 1 chunk")
        self.n_records, self.batch = n_records, batch
        self.rank, self.size = rank, size
        self.seed = seed
        self.per_epoch = n_records // batch if last == "drop" else -(-n_records // batch)
        if self.per_epoch == 0:
            raise ValueError(
                f'a batch of {batch}: there are {n_records} records, and last="drop" leaves no '
                'batch; last="fill" repeats records'
            )
        self._chunks = None if chunks is None else np.unique(chunks, return_inverse=True)[1]
        self._mix = mix
        self._order: tuple[int, Rows] | None = None

    def whole(self, iteration: int) -> Rows:
        """Return the records of the global batch of an iteration, 0 <= iteration."""
        if iteration < 0:
            raise ValueError(f"iteration {iteration}: the first is 0")
        epoch, place = divmod(iteration, self.per_epoch)
        order = self._order_of(epoch)
        first = place * self.batch
        if first + self.batch <= self.n_records:
            return order[first : first + self.batch]
        return np.take(order, range(first, first + self.batch), mode="wrap")

    def epoch(self, iteration: int) -> int:
        """Return the pass over the data that an iteration is part of."""
        return iteration // self.per_epoch

    def rows(self, iteration: int) -> Rows:
        """Return this rank's records of an iteration: never none."""
        return self.part(self.whole(iteration))

    def part(self, whole: Rows) -> Rows:
        """Return this rank's part of the records of a global batch."""
        size = self.size
        mine = whole[self.batch * self.rank // size : self.batch * (self.rank + 1) // size]
        return mine.copy()  # the order stays as it is

    def iterations(self, first: int, last: int) -> Iterations:
        """Return this rank's batches of the iterations from ``first`` up to ``last``, exclusive."""
        return Iterations(self, first, last)

    @property
    def largest(self) -> int:
        """Records of this rank's part; some iterations may have one less."""
        return -(-self.batch // self.size)

    def _order_of(self, epoch: int) -> Rows:
        kept = self._order
        if kept is None or kept[0] != epoch:
            order = self._new_order(epoch)
            order.flags.writeable = False
            self._order = kept = epoch, order
        return kept[1]

    def _new_order(self, epoch: int) -> Rows:
        if self.seed is None:
            return np.arange(self.n_records, dtype=np.int64)
        bits = np.random.MT19937(np.random.SeedSequence([self.seed, epoch]))
        random = np.random.RandomState(bits)
        order: npt.NDArray[Any] = random.permutation(self.n_records)
        if self._chunks is not None:
            turn = random.permutation(self._chunks.max() + 1) // self._mix  # of each chunk
            order = order[np.argsort(turn[self._chunks[order]], kind="stable")]
        return order.astype(np.int64, copy=False)


class Counted(Protocol):
    """Records whose number takes time to find."""

    def __len__(self) -> int: ...

    def reaches(self, count: int) -> bool:
        """Whether there are so many records: an answer that may take less time."""


class InOrder:
    """Batches in the order of the files; the first ones do not wait for the number of records."""

    seed = None

    def __init__(
        self, records: Counted, batch: int, *, rank: int, size: int, last: Literal["drop", "fill"]
    ) -> None:
        self._records, self.batch = records, batch
        self._options: dict[str, Any] = {"rank": rank, "size": size, "seed": None, "last": last}
        # With one batch, if there are so many records: wrong arguments raise now.
        enough = batch > 0 and records.reaches(batch)
        self._one = Batches(batch if enough else len(records), batch, **self._options)
        self.largest = self._one.largest
        self._all: Batches | None = None

    @property
    def all(self) -> Batches:
        """The batches of all records."""
        if self._all is None:
            self._all = Batches(len(self._records), self.batch, **self._options)
        return self._all

    @property
    def n_records(self) -> int:
        """Records of the data set."""
        return self.all.n_records

    @property
    def per_epoch(self) -> int:
        """Batches of an epoch."""
        return self.all.per_epoch

    def epoch(self, iteration: int) -> int:
        """Return the pass over the data that an iteration is part of."""
        return 0 if self._is_early(iteration) else self.all.epoch(iteration)

    def whole(self, iteration: int) -> Rows:
        """Return the records of the global batch of an iteration."""
        if not self._is_early(iteration):
            return self.all.whole(iteration)
        return np.arange(iteration * self.batch, (iteration + 1) * self.batch, dtype=np.int64)

    def rows(self, iteration: int) -> Rows:
        """Return this rank's records of an iteration."""
        return self._one.part(self.whole(iteration))

    def iterations(self, first: int, last: int) -> Iterations:
        """Return this rank's batches of some iterations."""
        return Iterations(self, first, last)

    def _is_early(self, iteration: int) -> bool:
        """Whether a batch is known to lie wholly in the first epoch."""
        return self._all is None and self._records.reaches((iteration + 1) * self.batch)


class Iterations:
    """One rank's batches of some iterations, in order: made by :meth:`Batches.iterations`.

    Each is an array of record numbers. It may be iterated over any number of times, and is a
    ``sampler`` (with ``batch_size=None``) or a ``batch_sampler`` of a DataLoader.

    Raises
    ------
    ValueError
        Not 0 <= first <= last.
    """

    def __init__(self, batches: Batches | InOrder, first: int, last: int) -> None:
        if not 0 <= operator.index(first) <= operator.index(last):
            raise ValueError(f"iterations {first} to {last}: 0 <= first <= last")
        self.batches, self.first, self.last = batches, first, last

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[Rows]:
        return map(self.batches.rows, range(self.first, self.last))
