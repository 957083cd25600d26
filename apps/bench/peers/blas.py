"""One process with as many threads as the others have ranks: NumPy's BLAS, or Dask's threads."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from bench.serving import run, serve_library


class Blas:
    """The operations; see :class:`bench.serving.Library`."""

    rank, size, version = 0, 1, f"numpy {np.__version__}"

    def barrier(self) -> None:
        """Wait for nobody."""

    def product(self, n: int) -> Callable[[], object]:
        """Multiply two matrices."""
        a, b, c = np.ones((3, n, n), np.float32)
        return lambda: np.matmul(a, b, out=c)


class Dask(Blas):
    """Arrays in chunks of rows, one for each thread."""

    def __init__(self) -> None:
        import dask

        self._n_threads = int(os.environ["OMP_NUM_THREADS"])
        self.version = f"dask {dask.__version__}, {self._n_threads} threads"

    def product(self, n: int) -> Callable[[], object]:
        """Multiply two arrays of NumPy in chunks."""
        import dask.array as da

        chunks = -(-n // self._n_threads), n
        a, b = (da.from_array(np.ones((n, n), np.float32), chunks) for _ in range(2))
        how = {"scheduler": "threads", "num_workers": self._n_threads}
        return lambda: (a @ b).compute(**how)

    def remap(self, n: int) -> Callable[[], object]:
        """Make chunks of columns out of those of rows."""
        import dask.array as da

        width = -(-n // self._n_threads)
        a = da.from_array(np.ones((n, n), np.float32), (width, n))
        how = {"scheduler": "threads", "num_workers": self._n_threads}
        return lambda: a.rechunk((n, width)).persist(**how)


def main() -> None:
    """Serve as the only process."""
    serve_library(Dask() if "BENCH_DASK" in os.environ else Blas())


if __name__ == "__main__":
    run(main)
