"""ScaLAPACK's PSGEMM, as Debian packages it over Open MPI (libscalapack-openmpi2.2)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_char_p, c_float, c_int
from typing import Any

import numpy as np

from bench.serving import run, serve_library

_BLOCK = 128


class Scalapack:
    """The operations; see :class:`bench.serving.Library`."""

    version = "ScaLAPACK 2.2 over Open MPI"

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libscalapack-openmpi.so.2.2")
        rank, size, grid = c_int(), c_int(), c_int()
        self._library.Cblacs_pinfo(byref(rank), byref(size))
        self.rank, self.size = rank.value, size.value
        self._library.Cblacs_get(-1, 0, byref(grid))
        down = next(p for p in range(int(self.size**0.5), 0, -1) if self.size % p == 0)
        self._shape = down, self.size // down
        self._library.Cblacs_gridinit(byref(grid), b"Row", *self._shape)
        self._grid = grid

    def barrier(self) -> None:
        """Wait for all processes."""
        self._library.Cblacs_barrier(self._grid, b"A")

    def product(self, n: int) -> Callable[[], object]:
        """Multiply two matrices that are dealt to a grid in blocks."""
        place = divmod(self.rank, self._shape[1])
        zero, one, width, edge = c_int(0), c_int(1), c_int(_BLOCK), c_int(n)
        local = [
            self._library.numroc_(
                byref(edge), byref(width), byref(c_int(at)), byref(zero), byref(c_int(many))
            )
            for at, many in zip(place, self._shape, strict=True)
        ]
        a, b, c = np.ones((3, max(1, local[1]), max(1, local[0])), np.float32)
        about, wrong = (c_int * 9)(), c_int()
        arguments = edge, edge, width, width, zero, zero, self._grid, c_int(max(1, local[0]))
        self._library.descinit_(about, *map(byref, arguments), byref(wrong))
        if wrong.value:
            raise ValueError(f"descinit: {wrong.value}")
        begin = byref(one), byref(one), about
        no, full, none = c_char_p(b"N"), byref(c_float(1)), byref(c_float(0))

        def at(array: Any) -> ctypes.c_void_p:
            return ctypes.c_void_p(array.ctypes.data)

        def call() -> None:
            sizes = byref(edge), byref(edge), byref(edge)
            self._library.psgemm_(
                no, no, *sizes, full, at(a), *begin, at(b), *begin, none, at(c), *begin
            )

        call()
        if local[0] and local[1] and c[-1, -1] != n:
            raise ValueError(f"a product of ones is {c[-1, -1]}, not {n}")
        return call


def main() -> None:
    """Serve as one process of an MPI job."""
    library = Scalapack()
    serve_library(library)
    library._library.Cblacs_exit(0)


if __name__ == "__main__":
    run(main)
