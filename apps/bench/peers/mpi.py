"""mpi4py, over the MPI that it was told to load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from bench.serving import Reduction, messages, run, serve_library
from pgasdl.runtime.mpi.library import version
from pgasdl.tools.bench.machine import pin

_POLLS_PER_PROGRESS = 64


class Mpi:
    """The operations; see :class:`bench.serving.Library`.

    ``created`` : windows are made over existing memory instead of MPI's own
    """

    def __init__(self, *, created: bool = False) -> None:
        self._comm, self._created = MPI.COMM_WORLD, created
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()
        self.version = version(MPI)
        self.barrier = self._comm.Barrier
        self._array = np.zeros(0, np.float32)
        self._window: tuple[int, Any] | None = None

    def allreduce(self, cuts: Sequence[int]) -> Reduction:
        """Call MPI_Allreduce in place, once per piece."""
        count = sum(cuts)
        if self._array.size != count:
            self._array = np.zeros(count, np.float32)
        array, rank, reduce = self._array, self.rank, self._comm.Allreduce
        ends = np.cumsum(cuts)
        pieces = [[array[end - n : end], MPI.FLOAT] for end, n in zip(ends, cuts, strict=True)]
        one = pieces[0]

        def several() -> None:
            for piece in pieces:
                reduce(MPI.IN_PLACE, piece, MPI.SUM)

        def single() -> None:
            reduce(MPI.IN_PLACE, one, MPI.SUM)

        call = several if len(pieces) > 1 else single
        return Reduction(lambda number: array.fill(number + rank), call, array)

    def reduce(self, cuts: Sequence[int]) -> Reduction:
        """Call MPI_Reduce to process 0, in place there."""
        array, root = np.zeros(sum(cuts), np.float32), self.rank == 0
        mine, rank, reduce = [array, MPI.FLOAT], self.rank, self._comm.Reduce
        given = (MPI.IN_PLACE, mine) if root else (mine, None)
        return Reduction(
            lambda number: array.fill(number + rank), lambda: reduce(*given, MPI.SUM, 0), array
        )

    def broadcast(self, cuts: Sequence[int]) -> Reduction:
        """Call MPI_Bcast from process 0."""
        array = np.zeros(sum(cuts), np.float32)
        mine, rank, broadcast = [array, MPI.FLOAT], self.rank, self._comm.Bcast
        return Reduction(
            lambda number: array.fill(number + rank), lambda: broadcast(mine, 0), array
        )

    def remap(self, n: int) -> Callable[[], object]:
        """Turn a cut into rows into a cut into columns, by MPI_Alltoallw."""
        edge = n // self.size
        source, target = np.zeros((edge, n), np.float32), np.zeros((n, edge), np.float32)

        def types(shape: tuple[int, int], axis: int) -> list[Any]:
            begins = [[0, 0] for _ in range(self.size)]
            for rank, begin in enumerate(begins):
                begin[axis] = rank * edge
            block = [edge, edge]
            made = [MPI.FLOAT.Create_subarray([*shape], block, begin) for begin in begins]
            return [each.Commit() for each in made]

        once = [1] * self.size, [0] * self.size
        sends = [source, *once, types(source.shape, 1)]
        receives = [target, *once, types(target.shape, 0)]
        return lambda: self._comm.Alltoallw(sends, receives)

    def ping(self, way: str, nbytes: int) -> Callable[[int], None]:
        """Send two-sided messages, or put, flush and raise a flag that the target polls."""
        return self._messages(nbytes) if way == "send" else self._puts(nbytes)

    def _messages(self, nbytes: int) -> Callable[[int], None]:
        comm, peer = self._comm, 1 - self.rank
        # Untouched memory is one page of zeros, which comes from the nearest cache.
        source = [np.ones(nbytes, np.uint8), MPI.BYTE]
        target = [np.ones(nbytes, np.uint8), MPI.BYTE]
        return messages(
            self.rank, partial(comm.Send, source, peer), partial(comm.Recv, target, peer)
        )

    def _puts(self, nbytes: int) -> Callable[[int], None]:
        if self._window is None or self._window[0] != nbytes:
            self.close()
            self._window = (nbytes, self._window_of(nbytes + 64))
            self._window[1].Lock_all()
        window: Any = self._window[1]
        memory = np.frombuffer(window.tomemory(), np.uint8)
        memory[:] = 0
        # A plain memoryview reads one word much faster than an array does.
        flag = memoryview(window.tomemory())[nbytes - nbytes % 8 + 8 :][:8].cast("B").cast("q")
        place = nbytes - nbytes % 8 + 8
        source = [np.ones(nbytes, np.uint8), MPI.BYTE]
        number = np.zeros(1, np.int64)
        word = [number, MPI.INT64_T]
        data_at, flag_at = (0, nbytes, MPI.BYTE), (place, 1, MPI.INT64_T)
        put, flush, sync = window.Put, window.Flush, window.Sync
        probe, peer = self._comm.Iprobe, 1 - self.rank
        self._comm.Barrier()

        def send(value: int) -> None:
            put(source, peer, data_at)
            flush(peer)
            number[0] = value
            put(word, peer, flag_at)
            flush(peer)

        def receive(value: int) -> None:
            polls = 0
            while flag[0] < value:
                sync()
                polls += 1
                if polls % _POLLS_PER_PROGRESS == 0:
                    probe()

        state = [0]

        def first(rounds: int) -> None:
            for value in range(state[0] + 1, state[0] + rounds + 1):
                send(value)
                receive(value)
            state[0] += rounds

        def second(rounds: int) -> None:
            for value in range(state[0] + 1, state[0] + rounds + 1):
                receive(value)
                send(value)
            state[0] += rounds

        return first if self.rank == 0 else second

    def _window_of(self, nbytes: int) -> Any:
        if self._created:
            return MPI.Win.Create(bytearray(nbytes), 1, comm=self._comm)
        return MPI.Win.Allocate(nbytes, 1, comm=self._comm)

    def close(self) -> None:
        """Free the window. Collective."""
        if self._window is not None:
            self._window[1].Unlock_all()
            self._window[1].Free()
            self._window = None


def main() -> None:
    """Serve as one process of an MPI job."""
    library = Mpi()
    pin(library.rank, library.size)
    serve_library(library)


if __name__ == "__main__":
    run(main)
