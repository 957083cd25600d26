"""The backend of torch.distributed with tensors on the GPU, which the ranks share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from on_device import attached, foreign, ranks
from on_device.findings import Tell

BACKENDS = ("pgasdl", "cpu:pgasdl,cuda:pgasdl")
PROGRAMS = ("collectives", "training", "sharded")


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    with tell.step("PyTorch"):
        foreign.require_torch()
        for number, name in enumerate(BACKENDS):
            for program in PROGRAMS[: len(PROGRAMS) if number == 0 else 1]:
                with tell.step(f"{name}, {program}"), tempfile.TemporaryDirectory() as folder:
                    ranks.run(
                        2, f"on_device.backend:{program}", tell, timeout=40,
                        backend=name, store=f"{folder}/store",
                    )  # fmt: skip
                    tell.check(f"{name}, {program}", True)


def begun(ctx: Any, backend: str, store: str) -> Any:
    from torch import distributed

    distributed.init_process_group(
        backend, init_method=f"file://{store}", rank=ctx.rank, world_size=ctx.size
    )
    return distributed


def calls(dist: Any, rank: int, place: Callable[[Any], Any]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Every collective: its name, its work, what it was given, its results."""
    import torch

    later = {"async_op": True}

    def part(seed: int, count: int = 100_003, dtype: Any = torch.float32) -> Any:
        generator = torch.Generator().manual_seed(10 * seed + rank)
        return place(torch.randint(1, 9, (count,), generator=generator).to(dtype))

    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            mine = part(1, dtype=dtype)
            yield f"all_reduce of {dtype}", dist.all_reduce(mine, op, **later), [], [mine]
    turned = part(2, 1000).reshape(10, 100).t()
    yield "all_reduce, strided", dist.all_reduce(turned, **later), [], [turned]
    for root in (0, 1):
        mine = part(3)
        yield "broadcast", dist.broadcast(mine, root, **later), [], [mine]
        mine = part(4)
        yield "reduce", dist.reduce(mine, root, **later), [], [mine]
        mine, out = part(5), [part(6), part(6)] if rank == root else None
        yield "gather", dist.gather(mine, out, root, **later), [mine], out or []
        given, out = [part(7), part(8)] if rank == root else None, part(9)
        yield "scatter", dist.scatter(out, given, root, **later), given or [], [out]
    mine, out = part(10), [part(11), part(11)]
    yield "all_gather", dist.all_gather(out, mine, **later), [mine], out
    mine, out = part(12), part(13, 200_006)
    yield "into tensor", dist.all_gather_into_tensor(out, mine, **later), [mine], [out]
    given, out = [part(14), part(15)], part(16)
    yield "reduce_scatter", dist.reduce_scatter(out, given, **later), given, [out]
    mine, out = part(17, 200_006), part(18)
    yield "reduce_scatter_tensor", dist.reduce_scatter_tensor(out, mine, **later), [mine], [out]
    given, out = [part(19), part(20)], [part(21), part(21)]
    yield "all_to_all", dist.all_to_all(out, given, **later), given, out
    mine, out = part(22, 200_006), part(23, 200_006)
    yield "all_to_all_single", dist.all_to_all_single(out, mine, **later), [mine], [out]
    mine, out = part(24), part(25)
    sent, received = dist.isend(mine, 1 - rank), dist.irecv(out, 1 - rank)
    sent.wait()
    yield "a message", received, [mine], [out]


def collectives(ctx: Any, tell: Tell, *, backend: str, store: str) -> None:
    """As on the host: behind kernels, on streams of the program's, by wait and by future."""
    import torch

    dist = begun(ctx, backend, store)
    right = []
    for _, work, _, outputs in calls(dist, ctx.rank, lambda tensor: tensor):
        work.wait()
        right.append([each.clone() for each in outputs])
    big = torch.randn(2048, 2048, device="cuda") / 50

    def place(tensor: Any) -> Any:
        """Into memory that is overwritten late."""
        nonlocal big
        made = torch.full_like(tensor, 77, device="cuda")
        big = big @ big / 50
        return made.copy_(tensor.pin_memory(), non_blocking=True)

    for by_future in (False, True):
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
            torch.cuda.synchronize()
            found = []
            with torch.cuda.stream(stream):
                for name, work, given, outputs in calls(dist, ctx.rank, place):
                    if by_future:
                        work.get_future().wait()
                    else:
                        work.wait()
                    for each in given:
                        each.fill_(50)
                    found.append((name, [each.clone() for each in outputs]))
            torch.cuda.synchronize()
            for wanted, (name, results) in zip(right, found, strict=True):
                for one, other in zip(wanted, results, strict=True):
                    assert one.equal(other.cpu()), f"{name}, by a future: {by_future}"
    dist.barrier()
    dist.destroy_process_group()


def training(ctx: Any, tell: Tell, *, backend: str, store: str) -> None:
    """DistributedDataParallel over the backend; as one process trains."""
    import torch
    from torch import nn

    expected, optimizer = attached.torch_model()
    attached.torch_trained(expected, optimizer, slice(8))
    dist = begun(ctx, backend, store)
    inner, optimizer = attached.torch_model()
    net = nn.parallel.DistributedDataParallel(inner, bucket_cap_mb=0.05)
    attached.torch_trained(net, optimizer, slice(4 * ctx.rank, 4 * ctx.rank + 4))
    torch.cuda.synchronize()
    for mine, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    dist.barrier()
    dist.destroy_process_group()


def sharded(ctx: Any, tell: Tell, *, backend: str, store: str) -> None:
    """FSDP2, the second half from a distributed checkpoint; as one process trains."""
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    expected, optimizer = attached.torch_model()
    attached.torch_trained(expected, optimizer, slice(8))
    attached.torch_trained(expected, optimizer, slice(8))
    dist = begun(ctx, backend, store)
    mesh = init_device_mesh("cuda", (ctx.size,))
    part = slice(4 * ctx.rank, 4 * ctx.rank + 4)

    def made() -> tuple[Any, Any]:
        net, _ = attached.torch_model()
        for layer in net:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net, torch.optim.AdamW(net.parameters(), 0.01)

    net, optimizer = made()
    attached.torch_trained(net, optimizer, part)
    weights, state = get_state_dict(net, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=f"{store}.saved")
    net, optimizer = made()
    weights, state = get_state_dict(net, optimizer)
    stored = {"model": weights, "optimizer": state}
    checkpoint.load(stored, checkpoint_id=f"{store}.saved")
    set_state_dict(
        net, optimizer, model_state_dict=stored["model"], optim_state_dict=stored["optimizer"]
    )
    attached.torch_trained(net, optimizer, part)
    for mine, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)
    dist.barrier()
    dist.destroy_process_group()
