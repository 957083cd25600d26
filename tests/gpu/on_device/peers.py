"""All-reduce beside others on the same tensors: gloo and NCCL."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable
from typing import Any

from on_device import ranks
from on_device.allreduce import size
from on_device.findings import Tell
from on_device.foreign import require_torch
from on_device.staged import compared

SIZES = (1 << 10, 1 << 20, 16 << 20, 64 << 20)
LOCAL = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    sizes = (1 << 10,) if smoke else SIZES
    with tell.step("beside PyTorch's"):
        require_torch()
        for backend, own_hosts in (
            ("pgasdl", False), ("gloo", False), ("nccl", False), ("nccl", True)
        ):  # fmt: skip
            how = f"{backend}, each rank a host of its own" if own_hosts else backend
            with tell.step(f"beside {how}"), tempfile.TemporaryDirectory() as folder:
                ranks.run(
                    2, "on_device.peers:beside", tell, timeout=30, env=LOCAL, sizes=sizes,
                    backend=backend, how=how, own_hosts=own_hosts, folder=folder,
                )  # fmt: skip


def beside(
    ctx: Any,
    tell: Tell,
    *,
    sizes: list[int],
    backend: str,
    how: str,
    own_hosts: bool,
    folder: str,
) -> None:
    """A tensor in a segment, and one elsewhere, by both."""
    import torch
    from torch import distributed

    torch.cuda.init()
    if own_hosts:  # hides from NCCL that ranks share a GPU, so it uses sockets
        os.environ["NCCL_HOSTID"] = str(ctx.rank)
    try:
        distributed.init_process_group(
            backend, init_method=f"file://{folder}/store", rank=ctx.rank, world_size=ctx.size,
            timeout=datetime.timedelta(seconds=15),
        )  # fmt: skip
        distributed.all_reduce(torch.zeros(1000, device="cuda"))
        torch.cuda.synchronize()
    except Exception as error:
        tell(f"beside {how}", f"not available: {type(error).__name__}: {str(error)[-400:]}")
        os._exit(0)  # the process group may hold it up
    for nbytes in sizes:
        segment = ctx.segment(nbytes, device="cuda:0")
        inside, elsewhere = segment.torch(torch.float32), torch.zeros(nbytes // 4, device="cuda")
        handle = ctx.allreduce_handle(inside)
        calls: dict[str, Callable[[], Any]] = {
            "in a segment": handle,
            "elsewhere": lambda tensor=elsewhere: ctx.allreduce(tensor),  # type: ignore[misc]
            how: lambda tensor=elsewhere: distributed.all_reduce(tensor),  # type: ignore[misc]
        }
        medians = compared(ctx, calls, torch.cuda.synchronize, nbytes)
        for name, median in medians.items():
            tell(f"beside {how}, {size(nbytes)}: {name}", 1e6 * median, "us")
        ctx.barrier()
        handle.close()
        segment.delete()
    ctx.barrier()
    distributed.destroy_process_group()
