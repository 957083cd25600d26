"""DistributedDataParallel over gloo, and with pgasdl's hook: the same training."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import torch
from ending import end_at_once
from torch import distributed, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import pgasdl
from pgasdl.torch import DDPState, ddp_hook

# Small: a model has several buckets, and they are made anew after the first iteration.
BUCKET_MB = 0.002


def trained(ctx: pgasdl.Context, state: DDPState | None, uneven: bool, view: bool) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    ddp = DistributedDataParallel(
        net.double(), bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=view
    )
    if state is not None:
        ddp.register_comm_hook(state, ddp_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(ctx.rank)
    steps = 5 + (2 * ctx.rank if uneven else 0)
    with Join([ddp]) if uneven else contextlib.nullcontext():
        for _ in range(steps):
            optimizer.zero_grad()
            x = torch.randn(4, 8, generator=generator, dtype=torch.float64)
            ddp(x).square().mean().backward()
            optimizer.step()
    return torch.cat([each.detach().flatten() for each in net.parameters()])


def main() -> None:
    """Compare; one line for each rank."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # in whatever container
    store = f"file://{sys.argv[1]}"
    with pgasdl.init() as ctx:
        distributed.init_process_group("gloo", store, rank=ctx.rank, world_size=ctx.size)
        for uneven in (False, True):
            for view in (False, True):
                state = DDPState(ctx)
                ours = trained(ctx, state, uneven, view)
                theirs = trained(ctx, None, uneven, view)
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
                everybody = [torch.empty_like(ours) for _ in range(ctx.size)]
                distributed.all_gather(everybody, ours)
                assert all(torch.equal(each, ours) for each in everybody)
                for _ in range(2):
                    state.close()
        distributed.destroy_process_group()
        print(f"rank {ctx.rank} is right")
    end_at_once()


main()
