"""Process groups that are made, used and destroyed leave nothing: ``many_groups.py TIMES``.

Started as by torchrun, or by an MPI with the name of a file where the ranks meet.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import sys
import time
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import new_group

FIRST = 20  # after so many, what is made once is there
KIB = 4096  # PyTorch itself keeps some for each group, over gloo, too
SIZE = re.compile(r"^Size: +(\d+) kB$", re.MULTILINE)


def held(context: Any) -> dict[str, Any]:
    gc.collect()
    with open("/proc/self/smaps", encoding="ascii") as file:
        mappings = re.split(r"^(?=[0-9a-f]+-)", file.read(), flags=re.MULTILINE)
    shared = [each for each in mappings if "/memfd:pgasdl" in each or "/dev/shm" in each]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared mappings": len(shared),
        "their KiB": sum(int(size) for each in shared for size in SIZE.findall(each)),
        **dataclasses.asdict(context.footprint()),
        "lines": context.describe().count("\n"),
    }


def more(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether something is left. Less is there once a peer has ended, whose connections go."""
    return any(now[name] > before[name] for name in before)


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def use(group: Any, rank: int) -> None:
    total, whole = torch.ones(1000), torch.zeros(2000)
    distributed.all_reduce(total, group=group)
    gather = getattr(distributed, "all_gather_single", None)
    (gather or distributed.all_gather_into_tensor)(whole, total, group=group)  # before 2.13
    assert (whole == 2).all()
    if rank == 0:
        distributed.send(total, 1, group=group)
    else:
        distributed.recv(whole[:1000], 0, group=group)


def split(rank: int) -> None:
    """Split the group of all: what PyTorch has for groups on accelerators alone."""
    both: Any = distributed.split_group(split_ranks=[[1, 0]], group_desc="both")
    part: Any = distributed.split_group(both, [[1], [0]])
    assert [both.rank(), both.size(), both.group_desc] == [rank, 2, "both"]
    assert distributed.get_process_group_ranks(part) == [rank] and part.size() == 1
    assert len({both.group_name, part.group_name, distributed.group.WORLD.group_name}) == 3
    use(both, rank)
    distributed.all_reduce(mine := torch.ones(1), group=part)
    assert mine == 1
    one: Any = distributed.split_group(split_ranks=[[1]])
    assert (one is None) == (rank == 0)
    for wrong in (None, [], [[]], [[0, 0]], [[0], [0, 1]], [[2]], [[-1]]):
        with pytest.raises(ValueError, match="ranks"):
            distributed.split_group(split_ranks=wrong)
    with pytest.raises(ValueError, match="'gloo': a part of a group of 'pgasdl' is one, too"):
        distributed.split_group(split_ranks=[[0, 1]], backend="gloo")
    for group in (part, both, one):
        if group is not None:
            distributed.destroy_process_group(group)
    with pytest.raises(ValueError, match="was destroyed"):
        distributed.split_group(both, [[0]])
    with pytest.raises(RuntimeError, match="has no merge_remote_group"):
        distributed.group.WORLD.merge_remote_group(None, 1)


def main() -> None:
    """Make groups, one after the other, and compare what is held."""
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        from mpi4py import MPI

        place = {"rank": MPI.COMM_WORLD.rank, "world_size": MPI.COMM_WORLD.size}
        distributed.init_process_group("pgasdl", f"file://{sys.argv[2]}", **place)
    else:
        distributed.init_process_group("pgasdl")
    rank, context = distributed.get_rank(), distributed.group.WORLD.context
    messages = context.footprint().workspace_bytes
    use(None, rank)
    first = context.footprint().workspace_bytes
    assert first > messages > 0
    split(rank)
    before: dict[str, Any] = {}
    kib = 0

    def make(number: int) -> None:
        group = distributed.split_group(split_ranks=[[0, 1]]) if number % 2 else new_group()
        use(group, rank)
        distributed.destroy_process_group(group)
        if context.mapped:  # else once the peer has destroyed it, too, at the next group
            assert context.footprint().workspace_bytes == first

    for number in range(int(sys.argv[1])):
        make(number)
        if number <= FIRST:  # the most that there is at a time
            now = held(context)
            before = {name: max(before.get(name, 0), now[name]) for name in now}
            kib = max(kib, resident())
    after = held(context)
    for number in range(2 * FIRST):
        left = torch.tensor(more(after, before), dtype=torch.int32)
        distributed.all_reduce(left, distributed.ReduceOp.MAX)
        if not left:
            break
        make(number)  # windows of an MPI are freed when later ones are made
        time.sleep(0.1)
        after = held(context)
    assert not more(after, before), f"{before} before, {after} after"
    grown = resident() - kib
    # An MPI that does not map them may have a few windows more at one time than at another.
    assert grown < (KIB if context.mapped else 4 * KIB), grown
    sys.stdout.write(f"rank {rank} left nothing; {grown} KiB more are resident\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
