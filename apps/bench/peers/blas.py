"""NumPy's BLAS, in one process with as many threads as the others have ranks."""

from __future__ import annotations

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


if __name__ == "__main__":
    run(lambda: serve_library(Blas()))
