"""Three ranks: a group of all, of two, and of all again: ``reconfigure.py STORE``."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
c10d: Any = distributed_c10d  # its functions for this have no public names yet


def handles(store: Any, name: str, ranks: list[int]) -> list[str]:
    store.set(f"{name}/{RANK}", c10d._get_reconfigure_handle())
    return [store.get(f"{name}/{rank}").decode() for rank in ranks]


def train(n_ranks: int) -> None:
    """Gradients are means over the members."""
    torch.manual_seed(5)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    model(torch.full((1, 3), dist.get_rank() + 1.0)).sum().backward()
    mean = sum(range(1, n_ranks + 1)) / n_ranks
    assert torch.equal(model.module.weight.grad, torch.full((1, 3), mean))


def main(file: str) -> None:
    store = dist.FileStore(file, SIZE)
    options: dict[str, Any] = {"enable_reconfigure": True, "timeout": timedelta(seconds=60)}
    dist.init_process_group("pgasdl", store=store, rank=RANK, world_size=SIZE, **options)
    assert c10d._supports_reconfigure()
    everybody = list(range(SIZE))
    c10d._reconfigure(1, handles(store, "first", everybody)).wait()
    train(SIZE)
    if RANK != 1:
        c10d._reconfigure(2, handles(store, "second", [0, 2])).wait()
        assert (dist.get_rank(), dist.get_world_size()) == (RANK // 2, 2)
        train(2)
    c10d._reconfigure(3, handles(store, "third", everybody)).wait()
    train(SIZE)
    print("went on", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
