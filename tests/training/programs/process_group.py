"""Collectives and messages of torch.distributed over the backend "pgasdl".

Started as by torchrun, or by an MPI with the name of a file where the ranks meet.
"""

from __future__ import annotations

import sys

import torch
from torch import distributed


def pair(number: int, rank: int) -> None:
    """Make a group, which one rank destroys before the other has its message."""
    if number % 2:
        group = distributed.split_group(split_ranks=[[0, 1]])
    else:
        group = distributed.new_group([0, 1])
    if rank > 1:
        return
    total, word = torch.ones(1000), torch.full((2,), float(number))
    distributed.all_reduce(total, group=group)
    assert (total == 2).all()
    if rank == number % 2:
        distributed.send(word, 1 - rank, group=group)
        distributed.destroy_process_group(group)
        distributed.send(word, 1 - rank)
    else:
        distributed.recv(torch.empty(2), 1 - rank)
        distributed.recv(into := torch.empty(2), 1 - rank, group=group)
        assert torch.equal(into, word)
        distributed.destroy_process_group(group)


def main() -> None:
    """Check them; every rank prints its transport."""
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        from mpi4py import MPI

        place = {"rank": MPI.COMM_WORLD.rank, "world_size": MPI.COMM_WORLD.size}
        distributed.init_process_group("pgasdl", f"file://{sys.argv[1]}", **place)
    else:
        distributed.init_process_group("pgasdl")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    total = torch.full((100_000,), rank + 1.0)
    distributed.all_reduce(total)
    assert (total == size * (size + 1) / 2).all()
    most = torch.full((70_000,), rank, dtype=torch.int16)
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    assert (most == size - 1).all()
    parts = [torch.empty(300_000) for _ in range(size)]
    distributed.all_gather(parts, torch.full((300_000,), float(rank)))
    assert all((part == place).all() for place, part in enumerate(parts))
    into = torch.empty(200_000)
    coming = distributed.irecv(into, (rank - 1) % size)
    distributed.send(torch.full((200_000,), float(rank)), (rank + 1) % size)
    assert coming is not None and coming.wait()
    assert (into == (rank - 1) % size).all()
    for number in range(9):
        pair(number, rank)
    transport = distributed.group.WORLD.context.transport_of((rank + 1) % size)
    sys.stdout.write(f"rank {rank} over {transport}\n")  # in one piece, as other ranks write too
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
