"""Read batches ahead of their use, by a thread of each rank, into memory that is used again."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pgasdl.buffers import aligned, memory_of
from pgasdl.errors import BufferRefusedError, ClosedError, DataError, PgasTimeoutError
from pgasdl.input.batches import Iterations, Rows
from pgasdl.input.decode import Decoded, Fixed, Plain, Source

log = logging.getLogger("pgasdl")

_SOON = 1.0  # seconds without a buffer until a line in the log
Bytes = npt.NDArray[np.uint8]


class Prefetcher:
    """An iterator over batches, read by a thread while the ones before are in use.

    A batch is a dict with an array for each field, in one of ``depth`` buffers. The buffer is used
    again when nothing refers to the batch any more: no array, view, or tensor made of one
    (``torch.from_numpy``). A batch that is kept stays as it is; the reader waits when all are.
    Use it in a ``with`` statement, or :meth:`close` it: this ends the thread.

    Parameters
    ----------
    files : Records of NumPy's files, or others with ``dtype`` and ``read(rows, out)``
        Open until the prefetcher is closed. ``announce(rows)``, if they have it, is called for the
        records that come soon.
    iterations : Iterations
        This rank's batches: ``batches.iterations(first, last)``.
    depth : int, default 3
        Buffers, at least 2: one in use, the others being filled.
    memory : array, tensor or segment, optional
        Where the buffers lie: at least :meth:`nbytes` of it, contiguous and writable. A segment's
        batches can be read by peers; pinned memory's are copied to a GPU without a stop on the
        way. None: plain memory.
    timeout : float, default 60
        Seconds to wait for a batch.
    ahead : int, optional
        Batches that are announced before they are read: ``2 * depth`` by default.

    Raises
    ------
    ValueError
        ``depth`` below 2, or records that have to be decoded.
    BufferRefusedError
        ``memory`` is too small, strided or read-only.

    Notes
    -----
    One reader for each rank, with its own queue, as in S-Caffe (4.1) and swCaffe (5.2). A copy to
    a GPU that is under way (``non_blocking=True``) does not count as a use: keep the batch until
    the copy is done.
    """

    def __init__(
        self,
        files: Fixed | Decoded,
        iterations: Iterations,
        *,
        depth: int = 3,
        memory: Any = None,
        timeout: float = 60.0,
        ahead: int | None = None,
    ) -> None:
        ahead = 2 * depth if ahead is None else ahead
        source: Source = files if isinstance(files, Decoded) else Plain(files)
        nbytes = self.nbytes(files, iterations, depth)
        self._slot = _Slot(files.dtype, iterations.batches.largest)
        self._timeout = timeout
        whole = np.zeros(nbytes, np.uint8) if memory is None else bytes_of(memory, nbytes)
        size = self._slot.nbytes
        self._buffers = [whole[k * size : (k + 1) * size] for k in range(depth)]
        self._shared = _Shared()
        for number in range(depth):
            self._shared.free.put(number)
        self._done = False
        filled = [self._slot.arrays(buffer) for buffer in self._buffers]
        self._thread = threading.Thread(
            target=_fill,
            args=(self._shared, source, _announced(source, iterations, ahead), filled),
            name="pgasdl-prefetcher",
            daemon=True,
        )
        self._thread.start()
        # The thread does not know the prefetcher, and ends with it.
        self._end = weakref.finalize(self, self._shared.end)

    @staticmethod
    def nbytes(files: Fixed | Decoded, iterations: Iterations, depth: int = 3) -> int:
        """Return the bytes that ``depth`` buffers take."""
        if depth < 2:
            raise ValueError(f"depth {depth}: at least 2, one in use and one being filled")
        return depth * _Slot(files.dtype, iterations.batches.largest).nbytes

    def __iter__(self) -> Iterator[dict[str, npt.NDArray[Any]]]:
        return self

    def __next__(self) -> dict[str, npt.NDArray[Any]]:
        """Return the next batch.

        Raises
        ------
        PgasTimeoutError
            It is not there; the next call waits again.
        ClosedError
            The prefetcher is closed.
        DataError, OSError
            The error that the reader met. No batch follows.
        """
        if not self._end.alive:
            raise ClosedError("the prefetcher is closed")
        if self._done:
            raise StopIteration
        ready, soon = self._shared.ready, min(_SOON, self._timeout)
        try:
            got = ready.get(timeout=soon)
        except queue.Empty:
            if self._shared.starved:
                log.warning("input: %s", self._late(soon))
            try:
                got = ready.get(timeout=self._timeout - soon)
            except queue.Empty:
                raise PgasTimeoutError(self._late(self._timeout)) from None
        if isinstance(got, tuple):
            return self._lent(*got)
        self._done = True
        if got is not None:
            raise got
        raise StopIteration

    def close(self) -> None:
        """End the thread. Batches that are in use stay as they are. Idempotent.

        Raises
        ------
        PgasTimeoutError
            The thread is still in a read; call it again.
        """
        self._end()
        self._thread.join(self._timeout)
        if self._thread.is_alive():
            raise PgasTimeoutError(f"the prefetcher is still in a read after {self._timeout:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lent(self, buffer: int, n_rows: int) -> dict[str, npt.NDArray[Any]]:
        """Return a batch whose buffer becomes free when the last view of it is gone."""
        # NumPy's views refer to the array over the memoryview, not to what is below it.
        base = np.frombuffer(self._buffers[buffer].data, np.uint8)
        weakref.finalize(base, self._shared.free.put, buffer).atexit = False
        return self._slot.arrays(base, n_rows)

    def _late(self, seconds: float) -> str:
        waited = f"no batch after {seconds:g} s"
        if self._shared.starved:
            return (
                f"{waited}: all {len(self._buffers)} buffers hold batches that are in use; drop "
                "them, copy them, or give more depth"
            )
        if not self._thread.is_alive():
            return f"{waited}: the thread is gone; a forked process has to make its own prefetcher"
        return f"{waited}: the read is not done"


@dataclass(slots=True)
class _Shared:
    """The messages between the thread and the prefetcher."""

    free: queue.SimpleQueue[int | None] = field(default_factory=queue.SimpleQueue)
    # A buffer and its records, or the end.
    ready: queue.SimpleQueue[tuple[int, int] | BaseException | None] = field(
        default_factory=queue.SimpleQueue
    )
    ended: bool = False
    starved: bool = False  # the thread waits for a buffer

    def end(self) -> None:
        self.ended = True
        self.free.put(None)


class _Slot:
    """Where the fields of a batch lie in a buffer."""

    def __init__(self, record: np.dtype[Any] | None, n_rows: int) -> None:
        if record is None:
            raise ValueError("these records have to be decoded: pass them to a Loader")
        self.n_rows = n_rows
        self._places: list[tuple[str, int, np.dtype[Any]]] = []
        self.nbytes = 0
        for name in record.names or ():
            dtype = record[name]
            self._places.append((name, self.nbytes, dtype))
            self.nbytes += aligned(n_rows * dtype.itemsize)

    def arrays(self, buffer: Bytes, n_rows: int | None = None) -> dict[str, npt.NDArray[Any]]:
        n_rows = self.n_rows if n_rows is None else n_rows
        return {
            name: buffer[start : start + n_rows * dtype.itemsize]
            .view(dtype.base)
            .reshape(n_rows, *dtype.shape)
            for name, start, dtype in self._places
        }


def _announced(source: Source, iterations: Iterations, ahead: int) -> Iterator[tuple[int, Rows]]:
    """Yield each iteration and its records, when those of the next ``ahead`` are announced.

    The first one does not wait until the others are. An error comes behind those before it.
    """
    coming = enumerate(iterations, iterations.first)
    waiting: deque[tuple[int, Rows]] = deque()
    reach, failed = 1, None
    while True:
        try:
            for iteration, rows in islice(coming, 0 if failed else reach - len(waiting)):
                source.announce(rows)
                waiting.append((iteration, rows))
        except DataError as error:
            failed = error
        if not waiting:
            if failed:
                raise failed
            return
        yield waiting.popleft()
        reach = ahead + 1


def _fill(
    shared: _Shared,
    source: Source,
    batches: Iterator[tuple[int, Rows]],
    buffers: list[dict[str, npt.NDArray[Any]]],
) -> None:
    """Read every batch into a free buffer; say at the end that there is no more, or why not."""
    try:
        for iteration, rows in batches:
            shared.starved = True
            number = shared.free.get()
            shared.starved = False
            if number is None or shared.ended:
                return
            out = {name: array[: len(rows)] for name, array in buffers[number].items()}
            shared.ready.put((number, source.read(rows, out, iteration)))
    except BaseException as error:
        shared.ready.put(error)
    else:
        shared.ready.put(None)


def bytes_of(memory: Any, nbytes: int) -> Bytes:
    """Return the first bytes of an array, tensor or segment."""
    found = memory_of(memory).on_host()
    if found.nbytes < nbytes:
        raise BufferRefusedError(f"{found.nbytes} bytes of memory: the buffers take {nbytes}")
    return found[:nbytes]
