"""PyTorch's DTensor, over gloo or over pgasdl's backend."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from bench.serving import run, serve_library


class DTensors:
    """The operations; see :class:`bench.serving.Library`."""

    def __init__(self, rank: int, size: int, store: str) -> None:
        torch.set_num_threads(1)
        backend = os.environ["BENCH_BACKEND"]
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
        self.rank, self.size = rank, size
        self.version = f"torch {torch.__version__} over {backend}"
        self.barrier = dist.barrier
        self._mesh = dist.init_device_mesh("cpu", (size,))

    def product(self, n: int) -> Callable[[], object]:
        """Multiply two matrices that are cut into rows."""
        a, b = (distribute_tensor(torch.ones(n, n), self._mesh, [Shard(0)]) for _ in range(2))
        return lambda: a @ b

    def remap(self, n: int) -> Callable[[], object]:
        """Turn a cut into rows into a cut into columns."""
        a = distribute_tensor(torch.ones(n, n), self._mesh, [Shard(0)])
        return lambda: a.redistribute(placements=[Shard(1)])


def main() -> None:
    """Serve as one process of a job."""
    library = DTensors(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    serve_library(library)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
