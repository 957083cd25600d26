"""Programs in the words of torch's symmetric memory and windows; they know nothing of pgasdl.

``symm_mem`` is ``torch.distributed._symmetric_memory`` or what stands for it, ``group`` what its
``rendezvous`` takes; ``window`` is one of c10d without a tensor.
"""

from __future__ import annotations

from typing import Any

import torch


def one_shot_all_reduce(symm_mem: Any, group: Any, rounds: int = 5) -> None:
    """Every rank reads all buffers: needs memory that is mapped."""
    buffer = symm_mem.empty(3, 5, dtype=torch.float32, device="cpu")
    handle = symm_mem.rendezvous(buffer, group)
    peers = range(handle.world_size)
    for number in range(rounds):
        buffer.fill_(handle.rank + number)
        handle.barrier(channel=0)
        total = torch.zeros(3, 5)
        for peer in peers:
            total += handle.get_buffer(peer, (3, 5), torch.float32)
        handle.barrier(channel=1)
        assert total.unique().item() == sum(peers) + number * handle.world_size


def ring_through_buffers(symm_mem: Any, group: Any, rounds: int = 20) -> None:
    """Each rank stores into its right neighbour's buffer, and signals: needs mapped memory."""
    buffer = symm_mem.empty(7, dtype=torch.int64, device="cpu")
    handle = symm_mem.rendezvous(buffer, group)
    right = (handle.rank + 1) % handle.world_size
    left = (handle.rank - 1) % handle.world_size
    there = handle.get_buffer(right, (7,), torch.int64)
    for number in range(rounds):
        there.fill_(100 * number + handle.rank)
        handle.put_signal(dst_rank=right, channel=2)
        handle.wait_signal(src_rank=left, channel=2)
        assert buffer.tolist() == [100 * number + left] * 7
        handle.put_signal(left, 3)
        handle.wait_signal(right, 3)


def ring_of_puts(symm_mem: Any, group: Any, rounds: int = 10, count: int = 7) -> None:
    """The same by the module's put_signal and wait_signal: runs on any memory."""
    buffer = symm_mem.empty(count, dtype=torch.int64, device="cpu")
    handle = symm_mem.rendezvous(buffer, group)
    right = (handle.rank + 1) % handle.world_size
    left = (handle.rank - 1) % handle.world_size
    for number in range(rounds):
        values = torch.arange(count) + 100 * number
        symm_mem.put_signal(values + handle.rank, handle, right)
        symm_mem.wait_signal(handle, left)
        assert torch.equal(buffer, values + left)
        handle.barrier()


def ring_through_windows(
    window: Any, rank: int, size: int, count: int, dtype: torch.dtype, async_op: bool
) -> None:
    """Each rank puts into its right neighbour's window, and signals."""
    tensor = torch.full((count,), rank, dtype=dtype)
    memory = torch.ones(count * size, dtype=dtype)
    window.tensor_register(memory)
    right, left = (rank + 1) % size, (rank - 1) % size
    for number in range(4):
        tensor.fill_(rank + 3 * number)
        work = window.put(tensor, right, right * count, async_op)
        if async_op:
            work.wait()
        work = window.signal(right, async_op)
        if async_op:
            work.wait()
        work = window.wait_signal(left, async_op)
        if async_op:
            work.wait()
        received = window.map_remote_tensor(rank)[rank * count : (rank + 1) * count]
        assert torch.equal(received, torch.full((count,), left + 3 * number, dtype=dtype))
        window.signal(left, False)
        window.wait_signal(right, False)
    window.tensor_deregister()
