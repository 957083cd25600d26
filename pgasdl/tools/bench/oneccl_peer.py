"""oneCCL through its C interface, over Intel MPI."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pgasdl.errors import UnavailableError
from pgasdl.tools.bench.peer import Library, Reduction, pin, run, serve, socket_path

# oneapi/ccl/v2/types.h
_ID_BYTES = 4096
_FLOAT32, _SUM = 7, 0


class _Id(ctypes.Structure):
    _fields_ = (("data", ctypes.c_byte * _ID_BYTES),)


class OneCcl:
    """The operations; see :class:`pgasdl.tools.bench.peer.Library`.

    Parameters
    ----------
    path : str
        Its library.
    mpi : Library
        The same processes under MPI.
    share : Callable[[bytes], bytes]
        Returns rank 0's bytes on every rank.
    """

    def __init__(self, path: str, mpi: Library, share: Callable[[bytes], bytes]) -> None:
        self._library = library = ctypes.CDLL(path)
        pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        functions: dict[str, list[Any]] = {
            "onecclGetVersion": [pointer],
            "onecclGetUniqueId": [pointer],
            "onecclCommInitRank": [pointer, size, _Id, integer],
            "onecclAllReduce": [pointer, pointer, size, integer, integer, pointer, pointer],
        }
        for name, arguments in functions.items():
            getattr(library, name).argtypes = arguments
            getattr(library, name).errcheck = _checked
        number, unique, self._comm = ctypes.c_int(), _Id(), ctypes.c_void_p()
        library.onecclGetVersion(ctypes.byref(number))
        if mpi.rank == 0:
            library.onecclGetUniqueId(ctypes.byref(unique))
        unique = _Id.from_buffer_copy(share(bytes(unique)))
        library.onecclCommInitRank(ctypes.byref(self._comm), mpi.size, unique, mpi.rank)
        self.rank, self.size, self.barrier = mpi.rank, mpi.size, mpi.barrier
        version = f"{number.value // 10000}.{number.value // 100 % 100}"
        self.version = f"oneCCL {version} over {mpi.version}"
        self._array = np.zeros(0, np.float32)

    def allreduce(self, cuts: Sequence[int]) -> Reduction:
        """Call onecclAllReduce in place, once per piece; without a stream it returns when done."""
        count = sum(cuts)
        if self._array.size != count:
            self._array = np.zeros(count, np.float32)
        array, rank = self._array, self.rank
        reduce, comm = self._library.onecclAllReduce, self._comm
        starts = array.ctypes.data + 4 * (np.cumsum(cuts) - cuts)
        pieces = list(zip(starts.tolist(), cuts, strict=True))

        def call() -> None:
            for start, length in pieces:
                reduce(start, start, length, _FLOAT32, _SUM, comm, None)

        return Reduction(lambda number: array.fill(number + rank), call, array)

    def ping(self, way: str, nbytes: int) -> Callable[[int], None]:
        """Raise UnavailableError: onecclSend crashes with memory of the host."""
        raise UnavailableError("oneCCL does not send memory of the host")


def _checked(result: int, function: Any, arguments: tuple[Any, ...]) -> None:
    if result:
        raise RuntimeError(f"{function.__name__} returned {result} (CCL_LOG_LEVEL=info says more)")


def main() -> None:
    """Serve as one process of a job under Intel MPI."""
    from mpi4py import MPI

    from pgasdl.tools.bench.mpi_peer import Mpi

    library = OneCcl(sys.argv[2], Mpi(), MPI.COMM_WORLD.bcast)
    pin(library.rank, library.size)
    serve(library, socket_path())


if __name__ == "__main__":
    run(main)
