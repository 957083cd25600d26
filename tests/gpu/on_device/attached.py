"""Models of PyTorch on a GPU, trained by ``attach`` and by ``ddp_hook``."""

from __future__ import annotations

import tempfile
from typing import Any

from on_device import foreign, ranks
from on_device.findings import Tell


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    with tell.step("PyTorch"):
        foreign.require_torch()
        for program in ("torch_attach", "torch_update"):
            with tell.step(program):
                ranks.run(2, f"on_device.attached:{program}", tell, timeout=40)
                tell.check(program, True)
        with tell.step("torch_ddp"), tempfile.TemporaryDirectory() as folder:
            ranks.run(2, "on_device.attached:torch_ddp", tell, timeout=40, store=f"{folder}/store")
            tell.check("torch_ddp", True)


def torch_model(**options: Any) -> tuple[Any, Any]:
    """A model, and its optimizer."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh()) for _ in range(6)]
    net = nn.Sequential(*layers).double().cuda()
    return net, torch.optim.AdamW(net.parameters(), 0.01, **options)


def torch_trained(net: Any, optimizer: Any, part: slice) -> None:
    """Some iterations, of this part of each batch."""
    import torch

    for step in range(8):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 64, generator=generator, dtype=torch.float64)[part].cuda()
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        loss.item()  # a pageable copy on the program's stream
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()


def torch_attach(ctx: Any, tell: Tell) -> None:
    """Each layer by itself, or all at once, on the streams that programs use; as one process."""
    import torch

    from pgasdl.torch import attach

    expected, optimizer = torch_model()
    torch_trained(expected, optimizer, slice(8))
    part = slice(4 * ctx.rank, 4 * ctx.rank + 4)
    for on in (torch.cuda.default_stream(), torch.cuda.Stream()):
        for options in ({}, {"deferred": False, "bucket_bytes": 1 << 20}):
            torch.cuda.synchronize()
            with torch.cuda.stream(on):
                net, optimizer = torch_model()
                with attach(net, optimizer, context=ctx, **options):
                    torch_trained(net, optimizer, part)
            torch.cuda.synchronize()
            for mine, theirs in zip(net.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs)
            ctx.barrier()


def torch_update(ctx: Any, tell: Tell) -> None:
    """Owners make AdamW's steps in its ways, on the streams that programs use; as one process."""
    import torch

    from pgasdl.torch import attach

    part = slice(4 * ctx.rank, 4 * ctx.rank + 4)
    for how in ({}, {"foreach": True}, {"fused": True}):
        expected, whole = torch_model(**how)
        torch_stepped(expected, whole, slice(8))
        for on in (torch.cuda.default_stream(), torch.cuda.Stream()):
            for options in ({}, {"deferred": False, "bucket_bytes": 1 << 20}):
                torch.cuda.synchronize()
                with torch.cuda.stream(on):
                    net, optimizer = torch_model(**how)
                    with attach(net, optimizer, context=ctx, kind="update", **options):
                        torch_stepped(net, optimizer, part)
                        # Each rank gets its share of the state that one rank saves.
                        optimizer.load_state_dict(optimizer.state_dict())
                torch.cuda.synchronize()
                for mine, theirs in zip(net.parameters(), expected.parameters(), strict=True):
                    torch.testing.assert_close(mine, theirs)
                    for key, value in whole.state[theirs].items():
                        torch.testing.assert_close(optimizer.state[mine][key], value)
                ctx.barrier()


def torch_stepped(net: Any, optimizer: Any, part: slice) -> None:
    """Some iterations, of this part of each batch; nobody looks at gradients."""
    import torch

    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 64, generator=generator, dtype=torch.float64)[part].cuda()
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def torch_ddp(ctx: Any, tell: Tell, *, store: str) -> None:
    """Some buckets by the hook, on the streams that programs use; as one process trains."""
    import torch
    from torch import distributed, nn

    from pgasdl.torch import DDPState, ddp_hook

    expected, optimizer = torch_model()
    torch_trained(expected, optimizer, slice(8))
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=ctx.rank, world_size=ctx.size
    )
    for on in (torch.cuda.default_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(on):
            inner, optimizer = torch_model()
            net = nn.parallel.DistributedDataParallel(inner, bucket_cap_mb=0.05)
            state = DDPState(ctx)
            net.register_comm_hook(state, ddp_hook)
            torch_trained(net, optimizer, slice(4 * ctx.rank, 4 * ctx.rank + 4))
        torch.cuda.synchronize()
        for mine, theirs in zip(net.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)
        state.close()
        ctx.barrier()
    distributed.destroy_process_group()
