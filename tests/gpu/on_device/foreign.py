"""Memory of PyTorch and CuPy: bound, viewed, reduced, ordered by their streams."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import numpy as np

import pgasdl
from on_device import ranks
from on_device.findings import NotAvailable, Tell

# How PyTorch allocates, and whether such a tensor can be bound; None: either, with a reason.
ALLOCATORS = {
    "": True,
    "expandable_segments:True": None,
    "backend:cudaMallocAsync": False,
}


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    with tell.step("PyTorch"):
        require_torch()
        for setting, binds in ALLOCATORS.items():
            of = tell.under(f"PyTorch, {setting or 'its allocator'}: ")
            with of.step("bind"):
                env = {"PYTORCH_CUDA_ALLOC_CONF": setting} if setting else {}
                ranks.run(2, "on_device.foreign:torch_bind", of, timeout=30, env=env, binds=binds)
        for program in ("torch_views", "torch_allreduce", "torch_pool", "torch_exchange"):
            with tell.step(program):
                ranks.run(2, f"on_device.foreign:{program}", tell, timeout=30)
                tell.check(program, True)
    with tell.step("CuPy"):
        cupy = imported("cupy")
        if not cupy.cuda.is_available():
            raise NotAvailable("CuPy finds no GPU")
        for pool, binds in (("", True), ("MemoryAsyncPool", False)):
            of = tell.under(f"CuPy, {pool or 'its pool'}: ")
            with of.step("bind"):
                ranks.run(2, "on_device.foreign:cupy_bind", of, timeout=30, pool=pool, binds=binds)
        with tell.step("cupy_arrays"):
            ranks.run(2, "on_device.foreign:cupy_arrays", tell, timeout=30)
            tell.check("cupy_arrays", True)


def require_torch() -> None:
    """PyTorch with CUDA and a GPU, or NotAvailable."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if (version := importlib.metadata.version("torch")).endswith("+cpu"):
            raise NotAvailable(f"PyTorch {version} has no CUDA")
    if not imported("torch").cuda.is_available():
        raise NotAvailable("this PyTorch has no CUDA, or no GPU")


def imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotAvailable(str(error)) from None


def told_bind(
    ctx: Any, tell: Tell, name: str, buffer: Any, to_host: Callable[[Any], Any], binds: bool | None
) -> None:
    """Bind 256 KiB or more of float32, and put from rank 0 to rank 1, or see it refused."""
    try:
        segment = ctx.bind(buffer)
    except (pgasdl.UnavailableError, pgasdl.BufferRefusedError) as refused:
        tell.check(f"{name} is refused", binds is not True, error=f"{refused}")
        return
    ctx.barrier()
    if ctx.rank == 0:
        ctx.write_notify(segment[0:4096], 1, segment[4096:8192], 3)
    else:
        ctx.notify_waitsome(segment, 3, 1)
        found = to_host(buffer)
        assert (found[1024:2048] == np.arange(1024)).all(), found[1024:1032]
    ctx.barrier()
    mine = to_host(buffer)
    ctx.allreduce(mine)
    ctx.allreduce(buffer)
    assert to_host(buffer).tobytes() == mine.tobytes(), "an allreduce of bound memory"
    handle = ctx.allreduce_handle(buffer)
    mine = to_host(buffer)
    ctx.allreduce(mine)
    handle()
    assert to_host(buffer).tobytes() == mine.tobytes(), "a handle on bound memory"
    ctx.barrier()
    tell.check(f"{name} is bound", binds is not False)


def from_torch(tensor: Any) -> Any:
    return tensor.cpu().numpy().copy()


def torch_bind(ctx: Any, tell: Tell, *, binds: bool | None) -> None:
    """Memory of the caching allocator: within a block, and one of 100 MB."""
    import torch

    kept = torch.empty(1000, device="cuda")
    for name, count in (("a tensor of 256 KiB", 1 << 16), ("a tensor of 100 MiB", 100 << 18)):
        tensor = torch.arange(count, dtype=torch.float32, device="cuda") + ctx.rank
        torch.cuda.synchronize()  # before a peer writes
        told_bind(ctx, tell, name, tensor, from_torch, binds)
    del kept


def torch_views(ctx: Any, tell: Tell) -> None:
    """A tensor over a segment, and over the peer's."""
    import torch

    segment = ctx.segment(1 << 16, device="cuda:0")
    mine, his = segment.torch(torch.float32), segment.torch(torch.float32, peer=1 - ctx.rank)
    assert mine.device.type == "cuda" and mine.data_ptr() == segment.address
    mine.fill_(ctx.rank + 1)
    torch.cuda.synchronize()
    ctx.barrier()
    assert (his == 2 - ctx.rank).all().item()
    ctx.barrier()
    his[:100] = 7.0
    torch.cuda.synchronize()
    ctx.barrier()
    assert mine[:100].eq(7).all().item() and mine[100].item() == ctx.rank + 1
    half = segment.torch(torch.bfloat16, 1 << 12, (16, 8))
    assert half.shape == (16, 8) and half.dtype == torch.bfloat16
    assert torch.utils.dlpack.from_dlpack(segment).data_ptr() == segment.address
    # A view keeps the memory.
    ctx.barrier()
    segment.delete()
    mine.add_(1)
    torch.cuda.synchronize()
    ctx.barrier()


def torch_allreduce(ctx: Any, tell: Tell) -> None:
    """Tensors of all dtypes on a stream of their own, behind a kernel, without waiting."""
    import torch

    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64
    ):  # fmt: skip
        for count in (5, 1_000_003):
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.manual_seed(ctx.rank)
                tensor = (100 * torch.randn(count, device="cuda")).to(dtype)
                mine = tensor.cpu()
                big = torch.randn(2048, 2048, device="cuda")
                for _ in range(5):
                    big = big @ big / 50
                tensor.mul_(1)
                ctx.allreduce(tensor)
                result = tensor.clone()
                ctx.allreduce(mine)
                same = result.cpu().view(torch.uint8).equal(mine.view(torch.uint8))
                assert same, f"{dtype} x {count}"
    ctx.barrier()


def torch_pool(ctx: Any, tell: Tell) -> None:
    """Tensors of the pool lie elsewhere on each rank, and are reduced in place."""
    import torch

    ctx.pool(1 << 20, device="cuda")
    padding = ctx.zeros(100 * ctx.rank + 1, torch.float32, device="cuda")
    tensor = ctx.empty((64, 50), torch.float32, device="cuda")
    assert tensor.is_cuda and ctx.empty_like(tensor).shape == tensor.shape
    handle = ctx.allreduce_handle(tensor)
    for reduce in (lambda: ctx.allreduce(tensor), handle):
        tensor.copy_(torch.randn(tensor.shape, device="cuda"))
        mine = tensor.cpu()
        reduce()
        ctx.allreduce(mine)
        assert tensor.cpu().equal(mine)
    assert not padding.any().item()
    ctx.barrier()


def torch_exchange(ctx: Any, tell: Tell) -> None:
    """Gradients are views, as ``p.grad`` would be."""
    import torch

    layers = [((64, 32), "f4"), ((64,), "f4")]
    with pgasdl.GradientExchange(ctx, layers, device="cuda") as exchange:
        for turn in range(3):
            for layer in (1, 0):
                gradient = exchange.gradient(layer)
                assert gradient.is_cuda and gradient.shape == layers[layer][0]
                gradient.copy_(torch.full(gradient.shape, float(ctx.rank + turn), device="cuda"))
                exchange.ready(layer)
            for layer in (0, 1):
                exchange.wait(layer)
                mean = exchange.gradient(layer) * 1.0
                wanted = turn + (ctx.size - 1) / 2
                assert mean.eq(wanted).all().item(), (turn, layer, mean)
    ctx.barrier()


def from_cupy(array: Any) -> Any:
    return array.get()


def cupy_bind(ctx: Any, tell: Tell, *, pool: str, binds: bool) -> None:
    """Memory of CuPy's pool, or of the driver's (cudaMallocAsync)."""
    import cupy

    if pool:
        cupy.cuda.set_allocator(getattr(cupy.cuda, pool)().malloc)
    array = cupy.arange(1 << 16, dtype=cupy.float32) + ctx.rank
    cupy.cuda.Device().synchronize()  # before a peer writes
    told_bind(ctx, tell, "an array of 256 KiB", array, from_cupy, binds)


def cupy_arrays(ctx: Any, tell: Tell) -> None:
    """Views of segments, and all-reduces on a stream."""
    import cupy

    segment = ctx.segment(1 << 16, device="cuda:0")
    mine, his = segment.cupy(np.float32), segment.cupy(np.float32, peer=1 - ctx.rank)
    assert mine.data.ptr == segment.address
    mine[:] = ctx.rank + 1
    cupy.cuda.Device().synchronize()
    ctx.barrier()
    assert (his == 2 - ctx.rank).all()
    ctx.barrier()
    ctx.pool(1 << 16, device="cuda:0")
    pooled = ctx.zeros((3, 1000), device="cuda:0")
    pooled += ctx.rank
    ctx.allreduce(pooled)
    assert (pooled == sum(range(ctx.size))).all() and ctx.empty_like(pooled).shape == (3, 1000)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for count in (5, 1_000_003):
            array = cupy.arange(count, dtype=cupy.float64) * (ctx.rank + 1)
            mine = array.get(stream=stream)
            stream.synchronize()
            ctx.allreduce(array)
            ctx.allreduce(mine)
            result = array * 1
            assert result.get(stream=stream).tobytes() == mine.tobytes()
    ctx.barrier()
