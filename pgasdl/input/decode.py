"""Decode records by a user's function, in threads or processes, in the order of their rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pgasdl.errors import ClosedError, DataError
from pgasdl.input.batches import Rows
from pgasdl.input.threads import Threads
from pgasdl.input.workers import Arrays, Decode, Workers, answer

log = logging.getLogger("pgasdl")

_TRIED = 15  # records at the beginning that may be bad before a good one

Get = Callable[[int], dict[str, Any]]
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
    """Records with the same fields of the same size, as NumPy's files have them."""

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The fields of a record."""

    def read(self, rows: Rows, out: Out, /) -> None:
        """Read records into arrays that have the record as first axis."""


class Source(Protocol):
    """The source of a prefetcher: batches whose content may depend on the iteration."""

    def read(self, rows: Rows, out: Out, iteration: int) -> int:
        """Read records of an iteration into arrays that have the record as first axis.

        Return how many: they are the first ones of the arrays.
        """

    def announce(self, rows: Rows) -> None:
        """Say which records will be read soon."""


class Plain:
    """Fixed records as a source: nothing is decoded."""

    def __init__(self, records: Fixed) -> None:
        self._records = records

    def read(self, rows: Rows, out: Out, iteration: int) -> int:
        """Read records, the same in every iteration."""
        self._records.read(rows, out)
        return len(rows)

    def announce(self, rows: Rows) -> None:
        """Say which records will be read soon, if the records have such a method."""
        if hasattr(self._records, "announce"):
            self._records.announce(rows)


class Decoded:
    """Records as a user's function decodes them: each to the same fields as the first one.

    The generator in ``decode(record, random)`` depends on seed, iteration and record alone,
    whichever worker decodes it. Up to 1 worker the caller's thread decodes. ``processes`` are for
    functions that hold Python's lock: ValueError if the function, which a module has to define,
    cannot be sent. With ``skip``, bad records are left out: ``skipped`` says why. ``dtype`` has a
    field for each array of the first good record; DataError: there is none. ``records`` stay open
    until this is closed.
    """

    def __init__(
        self,
        records: Encoded,
        decode: Decode,
        *,
        seed: int | None = 0,
        workers: int = 1,
        processes: bool = False,
        skip: bool = False,
    ) -> None:
        if workers < processes:
            raise ValueError(f"{workers} workers: at least {int(processes)}")
        self._records, self._decode, self._seed = records, decode, seed or 0
        self._skip, self.skipped = skip, dict[int, str]()
        self._closed = False
        self._workers = Workers(decode, workers) if processes else None
        # While some threads wait for a process's answer, others fetch. The caller only waits.
        n_threads = 2 * workers if processes else workers if workers > 1 else 0
        self._threads = Threads(n_threads, "pgasdl-decode") if n_threads else None
        try:
            self._model, first = self._first()
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

    def read(self, rows: Rows, out: Out, iteration: int) -> int:
        """Decode records of an iteration; record ``rows[k]`` lands in ``out[name][k]``.

        Where some are left out, the others move up. Returns how many there are. DataError: a record
        cannot be decoded, gives other fields than record 0, or its worker died twice; nothing
        writes into ``out`` any more. ClosedError: it was closed meanwhile.
        """
        self._check_open()
        numbered = enumerate(rows.tolist())
        get: Get = self._records.__getitem__
        if self._threads is None:
            if (nearby := getattr(self._records, "nearby", None)) is not None:
                get = nearby(rows)
            return _moved_up(out, [self._put(get, row, iteration, out, k) for k, row in numbered])
        tasks: list[Future[bool]] = []
        try:
            for k, row in numbered:
                tasks.append(self._threads.submit(self._put, get, row, iteration, out, k))
            wait(tasks, return_when=FIRST_EXCEPTION)
        finally:
            begun = [task for task in tasks if not task.cancel()]
            wait(begun)
        return _moved_up(out, [task.result() for task in begun])

    def close(self) -> None:
        """End threads and processes, without a wait for threads that decode. Idempotent."""
        self._closed = True
        if self._workers is not None:
            self._workers.close()
        if self._threads is not None:
            self._threads.close()

    def _first(self) -> tuple[int, Arrays]:
        """Return the first record that is good, and its decoded arrays."""
        for row in range(_TRIED + 1):
            try:
                return row, self._decoded(self._records.__getitem__, row, 0)
            except IndexError:  # to ask for the number may take long
                break
            except DataError as error:
                self._leave_out(row, error)
                if row == _TRIED:
                    raise
        raise DataError(f"none of the {len(self)} records can be decoded")

    def _leave_out(self, row: int, error: DataError) -> None:
        """Note a record that is bad; raise the error, unless such records are to be skipped."""
        if not self._skip:
            raise error
        if row not in self.skipped:
            self.skipped[row] = str(error)
            log.warning("input: skipped: %s", error)

    def _put(self, get: Get, row: int, iteration: int, out: Out, k: int) -> bool:
        """Decode a record into its place; False: it is left out."""
        try:
            arrays = self._decoded(get, row, iteration)
            found = _layout(arrays)
            if found != self._wanted:
                wanted = f"of record {self._model} {_text(self._wanted)}"
                raise DataError(f"{self._at(row)}: {_text(found)}, and {wanted}")
        except DataError as error:
            self._leave_out(row, error)
            return False
        for name, array in arrays.items():
            out[name][k] = array
        return True

    def _decoded(self, get: Get, row: int, iteration: int) -> Arrays:
        self._check_open()
        record, key = get(row), (self._seed, iteration, row)
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
            name = record.get("__key__", "")
            where = self._at(row) + (f", {name}" if name else "")
            raise DataError(f"{where}: {type(result).__name__}: {result}") from result
        return result

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the decoder is closed")

    def _at(self, row: int) -> str:
        return f"record {row} ({self._records.place(row)})"


def _moved_up(out: Out, good: list[bool]) -> int:
    """Close the gaps in a batch, and return how many records are left."""
    if not all(good):
        for array in out.values():
            array[: sum(good)] = array[np.flatnonzero(good)]
    return sum(good)


def _layout(arrays: Arrays) -> Layout:
    return {name: (array.dtype, array.shape) for name, array in arrays.items()}


def _text(layout: Layout) -> str:
    return ", ".join(
        f"{name} is {dtype} of shape {shape}" for name, (dtype, shape) in layout.items()
    )
