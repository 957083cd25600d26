"""Decode records by a user's function, in threads or processes, in the order of their rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pgasdl.errors import ClosedError, DataError
from pgasdl.input.batches import Rows
from pgasdl.input.workers import Arrays, Decode, Workers, answer

log = logging.getLogger("pgasdl")

Out = Mapping[str, npt.NDArray[Any]]
Layout = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]


class Encoded(Protocol):
    """Records of any size, for threads to share."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> dict[str, Any]: ...

    def announce(self, rows: Rows, /) -> None:
        """Fetch records soon."""

    def place(self, row: int, /) -> str:
        """Return where a record is, for messages."""


class Fixed(Protocol):
    """Records with the same fields of the same size, as :class:`StripedFiles` has them."""

    dtype: np.dtype[Any]

    def read(self, rows: Rows, out: Out, /) -> None:
        """Read records into arrays that have the record as first axis."""


class Source(Protocol):
    """What a prefetcher reads: batches whose content may depend on the iteration."""

    dtype: np.dtype[Any]

    def read(self, rows: Rows, out: Out, iteration: int) -> None:
        """Read records of an iteration into arrays that have the record as first axis."""

    def announce(self, rows: Rows) -> None:
        """Say which records will be read soon."""


class Plain:
    """Fixed records as a source: nothing is decoded."""

    def __init__(self, records: Fixed) -> None:
        self._records = records
        self.dtype = records.dtype

    def read(self, rows: Rows, out: Out, iteration: int) -> None:
        """Read records, the same in every iteration."""
        self._records.read(rows, out)

    def announce(self, rows: Rows) -> None:
        """Say which records will be read soon, to records that want to know."""
        if hasattr(self._records, "announce"):
            self._records.announce(rows)


class Decoded:
    """Records as a user's function decodes them: each to the same fields as record 0.

    Parameters
    ----------
    records : Encoded
        Open until this is closed.
    decode : function
        ``decode(record, random)`` returns a dict of arrays. The generator ``random`` depends on
        seed, iteration and record alone: what is drawn is the same whoever decodes it.
    seed : int, optional
        None is 0.
    workers : int, default 1
        Records that are decoded at a time. 0: the caller's thread does it.
    processes : bool, default False
        Decode in processes, not in threads: for functions that hold Python's lock. Records are
        fetched here, and sent. ``decode`` has to be a module's function.

    Attributes
    ----------
    dtype : dtype
        A field for each of the arrays of record 0.

    Raises
    ------
    ValueError
        ``workers`` is negative, or 0 with ``processes``; or ``decode`` cannot be sent.
    DataError
        Record 0 cannot be decoded.
    """

    def __init__(
        self,
        records: Encoded,
        decode: Decode,
        *,
        seed: int | None = 0,
        workers: int = 1,
        processes: bool = False,
    ) -> None:
        if workers < processes:
            raise ValueError(f"{workers} workers: at least {int(processes)}")
        self._records, self._decode, self._seed = records, decode, seed or 0
        self._closed = False
        self._workers = Workers(decode, workers) if processes else None
        # While some threads wait for a process's answer, others fetch.
        n_threads = 2 * workers if processes else workers
        self._threads = ThreadPoolExecutor(n_threads, "pgasdl-decode") if n_threads else None
        try:
            first = self._decoded(0, 0)
        except BaseException:
            self.close()
            raise
        self._wanted = _layout(first)
        self.dtype = np.dtype([(name, *layout) for name, layout in self._wanted.items()])

    def __len__(self) -> int:
        return len(self._records)

    def announce(self, rows: Rows) -> None:
        """Say which records will be read soon."""
        self._records.announce(rows)

    def read(self, rows: Rows, out: Out, iteration: int) -> None:
        """Decode records of an iteration; record ``rows[k]`` lands in ``out[name][k]``.

        Raises
        ------
        DataError
            A record cannot be decoded, gives other fields than record 0, or its worker died twice.
            Nothing writes into ``out`` any more.
        ClosedError
            It was closed meanwhile.
        """
        self._check_open()
        numbered = enumerate(map(int, rows))
        if self._threads is None:
            for k, row in numbered:
                self._put(row, iteration, out, k)
            return
        tasks: list[Future[None]] = []
        try:
            for k, row in numbered:
                tasks.append(self._threads.submit(self._put, row, iteration, out, k))
            wait(tasks, return_when=FIRST_EXCEPTION)
        finally:
            begun = [task for task in tasks if not task.cancel()]
            wait(begun)
        for task in begun:
            task.result()

    def close(self) -> None:
        """End threads and processes, without a wait for threads that decode. Idempotent."""
        self._closed = True
        if self._workers is not None:
            self._workers.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def _put(self, row: int, iteration: int, out: Out, k: int) -> None:
        """Decode a record into its place."""
        arrays = self._decoded(row, iteration)
        found = _layout(arrays)
        if found != self._wanted:
            raise DataError(
                f"{self._at(row)}: {_text(found)}, and of record 0 {_text(self._wanted)}"
            )
        for name, array in arrays.items():
            out[name][k] = array

    def _decoded(self, row: int, iteration: int) -> Arrays:
        self._check_open()
        record, key = self._records[row], (self._seed, iteration, row)
        if self._workers is None:
            result = answer(self._decode, record, key)
        else:
            try:
                result = self._workers.answer(record, key)
            except ChildProcessError as error:
                log.warning("%s: %s; another one decodes it", self._at(row), error)
                try:
                    result = self._workers.answer(record, key)
                except ChildProcessError as error:
                    raise DataError(f"{self._at(row)}: {error}, the second time") from error
        if isinstance(result, Exception):
            raise DataError(f"{self._at(row)}: {type(result).__name__}: {result}") from result
        return result

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the decoder is closed")

    def _at(self, row: int) -> str:
        return f"record {row} ({self._records.place(row)})"


def _layout(arrays: Arrays) -> Layout:
    return {name: (array.dtype, array.shape) for name, array in arrays.items()}


def _text(layout: Layout) -> str:
    return ", ".join(
        f"{name} is {dtype} of shape {shape}" for name, (dtype, shape) in layout.items()
    )
