"""DistributedDataParallel around a model with a spread layer trains what it trains without one."""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import torch
from ending import end_at_once
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import pgasdl
from pgasdl.torch import DistributedLinear


def trained(ctx: pgasdl.Context, model: nn.Module) -> Any:
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(ctx.rank)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=generator, dtype=torch.float64)
        ddp(x).square().mean().backward()
        optimizer.step()
    return ddp.module


def main() -> None:
    """Compare; one line for each rank."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # in whatever container
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Sequential(nn.Linear(32, 8))).double()
    with pgasdl.init() as ctx:
        store = f"file://{sys.argv[1]}"
        distributed.init_process_group("gloo", store, rank=ctx.rank, world_size=ctx.size)
        spread = copy.deepcopy(net)
        spread[2][0] = DistributedLinear(ctx, spread[2][0])
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(spread, ["none"])
        due, found = trained(ctx, net), trained(ctx, spread)
        mine = due[2][0].weight.detach().chunk(ctx.size)[ctx.rank].flatten()
        for one, other in (
            (found[2][0].weight.detach(), mine),
            (found[2][0].bias, due[2][0].bias),
            (found[0].weight, due[0].weight),
        ):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
        print(f"rank {ctx.rank} is right", flush=True)
        distributed.destroy_process_group()
        end_at_once()


if __name__ == "__main__":
    main()
