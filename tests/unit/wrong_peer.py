"""A peer of ``apps/peers_bench.py`` that sums nothing: started as gloo's processes are."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from bench.serving import Reduction, serve_library


class Wrong:
    rank, size, version = int(sys.argv[2]), int(sys.argv[3]), "none"

    def allreduce(self, cuts: Sequence[int]) -> Reduction:
        array = np.zeros(sum(cuts), np.float32)
        return Reduction(lambda number: array.fill(number + self.rank), lambda: None, array)

    def barrier(self) -> None:
        pass

    def ping(self, way: str, nbytes: int) -> None:
        raise NotImplementedError


if __name__ == "__main__":
    serve_library(Wrong())
