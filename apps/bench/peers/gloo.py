"""torch.distributed over gloo."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from bench.serving import Reduction, messages, run, serve_library


class Gloo:
    """The operations; see :class:`bench.serving.Library`."""

    def __init__(self, rank: int, size: int, store: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        self.rank, self.size = rank, size
        self.version = f"torch {torch.__version__}"
        self.barrier = dist.barrier
        self._tensor = torch.zeros(0)

    def allreduce(self, cuts: Sequence[int]) -> Reduction:
        """Call all_reduce once per piece."""
        count = sum(cuts)
        if self._tensor.numel() != count:
            self._tensor = torch.zeros(count)
        tensor, rank = self._tensor, self.rank
        pieces = torch.split(tensor, list(cuts))

        def call() -> None:
            for piece in pieces:
                dist.all_reduce(piece)

        return Reduction(lambda number: tensor.fill_(float(number + rank)), call, tensor)

    def ping(self, way: str, nbytes: int) -> Callable[[int], None]:
        """Send messages: gloo has no puts."""
        peer = 1 - self.rank
        source = torch.ones(nbytes, dtype=torch.uint8)
        target = torch.zeros(nbytes, dtype=torch.uint8)
        return messages(
            self.rank, partial(dist.send, source, peer), partial(dist.recv, target, peer)
        )


def main() -> None:
    """Serve as one process of a gloo job, unbound: gloo's own threads need processors."""
    library = Gloo(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    serve_library(library)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
