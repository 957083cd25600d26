"""Batches of an epoch, as users of DataLoader and StatefulDataLoader expect them."""

from __future__ import annotations

import logging
import operator
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from pgasdl.errors import ClosedError, DataError
from pgasdl.group import Group
from pgasdl.input.batches import Batches, InOrder
from pgasdl.input.decode import Decoded, Fixed
from pgasdl.input.files import Files
from pgasdl.input.prefetcher import Prefetcher, bytes_of
from pgasdl.input.workers import Decode

log = logging.getLogger("pgasdl")


class Loader:
    """A rank's parts of an epoch's batches, decoded ahead; each ``for`` is an epoch.

    ::

        def decode(record: dict[str, Any], random: np.random.Generator) -> dict[str, ArrayLike]:
            picture = Image.open(io.BytesIO(record["jpg"])).convert("RGB").resize((224, 224))
            return {"image": picture, "label": record["cls"]}

        with Loader(records, 256, decode=decode, group=ctx.world, workers=4) as loader:
            for epoch in range(3):
                for batch in loader:
                    train(batch["image"], batch["label"])

    A batch is a dict of arrays, with the record as first axis, in a buffer that is used again when
    nothing refers to the batch any more (see :class:`Prefetcher`). The batches are the same for
    any number of ranks and workers. A loop that is left in the middle, or by an error, is
    continued by the next one. The reading goes on over the end of an epoch.

    Parameters
    ----------
    records : Records
        Open until the loader is closed.
    batch : int
        Records of a batch of all ranks, at least one for each.
    decode : function, optional
        ``decode(record, random)`` returns a dict of arrays, of the same shape and dtype for each
        record. ``random`` depends on seed, iteration and record alone: use it to augment. None:
        the fields are numbers of one shape, and are taken as they are.
    group : Group, optional
        The ranks that share each batch: a collective. None: the group of the records, if they have
        one, or this process alone.
    seed : int, optional
        The seed of the order and of ``random``. None: the order of the files. A shuffled order is
        one of all records, so their number is found before the first batch; by the group of the
        records together.
    last : str, default "drop"
        The use of the records that are left over at the end of an epoch: "drop" or "fill".
    mix : int, optional
        Mix the records of so many blocks of 4 MiB at a time, for data sets that no cache holds; for
        Parquet files, of so many row groups. None: any record may follow any other. For Parquet
        files None mixes as many row groups, taken at random, as 128 MiB hold, unless 256 MiB hold
        all.
    workers : int, default 1
        Records that are decoded at a time. 0 and 1: by the thread that reads.
    processes : bool, default False
        Decode in processes, not in threads: for functions that hold Python's lock. ``decode`` has
        to be a module's function, and a script's own code stands below
        ``if __name__ == "__main__":``.
    on_error : str, default "raise"
        The use of a record that cannot be read or decoded, or whose arrays are unlike the others':
        "raise": :class:`DataError`. "skip": its batch has a record less; a log line, and
        :attr:`skipped`, name it. A batch of which a rank has no good record is an error, and so is
        a tar with damaged headers.
    depth : int, default 3
        Buffers, at least 2.
    ahead : int, optional
        Batches whose records are fetched before they are decoded: ``2 * depth`` by default.
    memory : array, tensor, segment, or function, optional
        Where the buffers lie, or a function that makes so many bytes of it: ``ctx.segment``, or
        ``lambda n: torch.empty(n, dtype=torch.uint8, pin_memory=True)``. Drop all batches before
        :meth:`load_state_dict`: the memory is used again.
    timeout : float, default 60
        Seconds to wait for a batch.

    Raises
    ------
    ValueError
        An argument is out of range, or ``decode`` cannot be sent to processes.
    DataError
        Record 0 cannot be decoded.
    BufferRefusedError
        ``memory`` is too small, strided or read-only.
    MismatchError
        The ranks of ``group`` gave other batches, seeds, ``last`` or ``mix``.
    """

    def __init__(
        self,
        records: Any,
        batch: int,
        *,
        decode: Decode | None = None,
        group: Group | None = None,
        seed: int | None = 0,
        last: Literal["drop", "fill"] = "drop",
        mix: int | None = None,
        workers: int = 1,
        processes: bool = False,
        on_error: Literal["raise", "skip"] = "raise",
        depth: int = 3,
        ahead: int | None = None,
        memory: Any = None,
        timeout: float = 60.0,
    ) -> None:
        batch = operator.index(batch)
        seed, mix = (each if each is None else operator.index(each) for each in (seed, mix))
        group = group or getattr(records, "group", None)
        rank, size = (0, 1) if group is None else (group.rank, group.size)
        if isinstance(group, Group):
            group.allgather(f"Loader: batch {batch}, seed {seed}, {last}, mix {mix}", b"")
        in_order = seed is None and mix is None
        if not in_order and hasattr(records, "index_together") and group is records.group:
            records.index_together()
        most = None if seed is None else getattr(records, "mix", None)
        mix = most if mix is None else mix
        if most is not None and mix > most:
            log.warning("input: mix=%d: %d row groups are kept decoded; more are slow", mix, most)
        self._given = {"seed": seed, "batch": batch, "last": last, "mix": mix}
        self._files: Files | None = getattr(records, "files", None)
        chunks = {} if mix is None else {"chunks": records.chunks, "mix": mix}
        self._batches = (
            InOrder(records, batch, rank=rank, size=size, last=last)
            if in_order and hasattr(records, "reaches")
            else Batches(len(records), batch, rank=rank, size=size, seed=seed, last=last, **chunks)
        )
        if on_error not in ("raise", "skip"):
            raise ValueError(f'on_error={on_error!r}: there are "raise" and "skip"')
        skip = on_error == "skip"
        self._source: Fixed | Decoded = (
            records
            if decode is None and not skip and getattr(records, "dtype", None) is not None
            else Decoded(
                *(records, decode or as_it_is),
                seed=seed,
                workers=workers,
                processes=processes,
                skip=skip,
            )
        )
        self._depth, self._timeout = depth, timeout
        self._ahead = 2 * depth if ahead is None else ahead
        self._order = records.follow(self._batches) if hasattr(records, "follow") else None
        nbytes = Prefetcher.nbytes(self._source, self._batches.iterations(0, 0), depth)
        memory = memory(nbytes) if callable(memory) else memory
        self._memory = None if memory is None else bytes_of(memory, nbytes)
        self._prefetcher: Prefetcher | None = None
        self._iteration = 0
        self._closed = False

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self._batches.per_epoch

    def __iter__(self) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Yield the rest of the current epoch.

        Raises
        ------
        PgasTimeoutError
            A batch is not there. The next loop waits for it again.
        DataError, OSError
            A record could not be read or decoded. The next loop tries the batch again.
        ClosedError
            The loader is closed.
        """
        epoch = self._batches.epoch(self._iteration)
        while self._batches.epoch(self._iteration) == epoch:
            batch = self._next()
            if all(len(array) for array in batch.values()):
                yield batch
            elif self._batches.batch > 1:
                raise DataError(f"iteration {self._iteration - 1}: no record of it is good")

    @property
    def skipped(self) -> dict[int, str]:
        """The records that ``on_error="skip"`` has left out here so far, and why each."""
        return dict(self._source.skipped) if isinstance(self._source, Decoded) else {}

    def state_dict(self) -> dict[str, int | str | None]:
        """Return where this loader is: the same on all ranks that are as far, for any number.

        ``state["iteration"] // len(loader)`` is the epoch.
        """
        files = self._files.in_order if self._files else None
        state = {"iteration": self._iteration, "records": self._batches.n_records}
        return {**state, **self._given, "files_in_order": files}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a loader was: the next ``for`` gives the rest of that epoch.

        Raises
        ------
        ValueError
            The state is of another seed, batch, ``last`` or ``mix``, or of other records, by their
            number, and the files' names, sizes and order. Nothing changed.
        """
        mine = self.state_dict()
        if missing := {"iteration", "seed", "batch", "records"} - state.keys():
            raise ValueError(f"a state without {', '.join(sorted(missing))}: it is no loader's")
        for name, value in mine.items():  # states of earlier versions have fewer
            if name != "iteration" and state.get(name, value) != value:
                raise ValueError(f"the state's {name} is {state[name]}, this loader's {value}")
        iteration = operator.index(state["iteration"])
        if iteration < 0:
            raise ValueError(f"the state's iteration is {iteration}: at least 0")
        self._stop()
        self._iteration = iteration

    def close(self) -> None:
        """End the threads and processes. Batches that are in use stay as they are. Idempotent.

        Raises
        ------
        PgasTimeoutError
            A record is still being read or decoded; call it again.
        """
        self._closed = True
        if isinstance(self._source, Decoded):
            self._source.close()
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self) -> dict[str, npt.NDArray[Any]]:
        while True:
            if self._closed:
                raise ClosedError("the loader is closed")
            if self._prefetcher is None:
                self._prefetcher = Prefetcher(
                    self._source,
                    self._batches.iterations(self._iteration, sys.maxsize),
                    depth=self._depth,
                    memory=self._memory,
                    timeout=self._timeout,
                    ahead=self._ahead,
                )
            batch = next(self._prefetcher, None)
            if batch is not None:
                self._iteration += 1
                if self._order is not None:
                    self._order.iteration = self._iteration
                return batch
            self._stop()  # an error ended it, which was raised

    def _stop(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None


def as_it_is(record: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    """Return the fields of a record that are numbers already."""
    encoded = [name for name, value in record.items() if isinstance(value, bytes | str)]
    if set(encoded) - {"__key__"}:
        raise TypeError(f"fields {encoded} are bytes or text: pass decode")
    return {name: value for name, value in record.items() if name != "__key__"}
