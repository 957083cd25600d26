"""Memory on GPUs as Python has it, by ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda_arrays import Array

import pgasdl
from pgasdl import _native, loopback
from pgasdl.buffers import memory_of
from pgasdl.tools import gpus

BYTES = 4096


def refusal(error: type[Exception], call: Callable[[], object]) -> str:
    """Why a call is refused."""
    try:
        call()
    except error as refused:
        return str(refused)
    raise AssertionError("it was not refused")


def copies(ctx: Any) -> None:
    """Each rank's copy is on its own GPU."""
    segment = ctx.segment(BYTES, device=f"cuda:{ctx.rank}")
    assert segment.device == f"cuda:{ctx.rank}"
    assert _native.cuda_device_of(segment.address) == ctx.rank
    there = np.ones(BYTES, np.uint8)
    segment.copy_to(there)
    assert not there.any()  # zero-filled
    segment.copy_from(np.arange(8.0) + ctx.rank, 64)
    ctx.barrier()
    if ctx.rank == 0:
        ctx.write_notify(segment[64:128], 1, segment[128:192], 0)
    else:
        ctx.notify_reset(segment, ctx.notify_waitsome(segment))
        mine, his = np.empty(8), np.empty(8)
        segment.copy_to(mine, 64)
        segment.copy_to(his, 128)
        assert (mine == np.arange(8.0) + 1).all() and (his == np.arange(8.0)).all()
    ctx.barrier()


def interfaces(ctx: Any) -> None:
    """Others see a segment's GPU by name, and what they offer is understood."""
    segment = ctx.segment(BYTES, device=f"cuda:{ctx.rank}")
    raw = memory_of(segment, device=True)
    assert (raw.address, raw.nbytes, raw.device) == (segment.address, BYTES, ctx.rank)
    interface = segment.__cuda_array_interface__
    halves = interface | {"shape": (BYTES // 8, 4), "typestr": "<f2"}
    there = memory_of(SimpleNamespace(__cuda_array_interface__=halves), device=True)
    assert (there.native_dtype, there.count, there.device) == ("float16", BYTES // 2, ctx.rank)
    exporter = type("Exporter", (), {
        "__dlpack__": lambda _, **options: segment.__dlpack__(**options),
        "__dlpack_device__": lambda _: segment.__dlpack_device__(),
    })()  # fmt: skip
    there = memory_of(exporter, device=True)
    assert (there.address, there.nbytes, there.device) == (segment.address, BYTES, ctx.rank)
    host = np.zeros(8)
    lies = interface | {"data": (host.ctypes.data, False), "shape": (64,)}
    lying = SimpleNamespace(__cuda_array_interface__=lies)
    assert "not memory of a GPU" in refusal(
        pgasdl.BufferRefusedError, lambda: memory_of(lying, device=True)
    )
    ctx.barrier()


def bound(ctx: Any) -> None:
    """Memory of another library's, which it offers by the interface."""
    home = ctx.segment(BYTES, device=f"cuda:{ctx.rank}")
    foreign = SimpleNamespace(__cuda_array_interface__=home.__cuda_array_interface__, home=home)
    segment = ctx.bind(foreign)
    assert segment.bound and segment.device == f"cuda:{ctx.rank}"
    assert segment.address == home.address
    home.copy_from(np.full(64, ctx.rank + 1, np.uint8))
    ctx.barrier()
    ctx.write(segment[0:64], 1 - ctx.rank, segment[64:128])
    ctx.wait()
    ctx.barrier()
    got = np.empty(64, np.uint8)
    home.copy_to(got, 64)
    assert (got == 2 - ctx.rank).all()
    ctx.barrier()


def refusals(ctx: Any) -> None:
    """Functions that need the host's memory say so."""
    segment = ctx.segment(BYTES, device="cuda")
    assert segment.device == "cuda:0"
    assert "by cupy() or torch()" in refusal(pgasdl.UnavailableError, segment.numpy)
    refusal(BufferError, lambda: memoryview(segment))
    for call in (
        lambda: ctx.world.combine(segment),
        lambda: segment.copy_from(segment),
        lambda: segment.copy_to(segment),
    ):
        assert "only host memory works here" in refusal(pgasdl.BufferRefusedError, call)
    for reduce in (ctx.allreduce, ctx.allreduce_handle):
        array = Array(8, np.float32, segment.address)
        seen = refusal(pgasdl.BufferRefusedError, lambda: reduce(array, "max"))  # noqa: B023
        assert "a GPU does sums and means" in seen
    seen = refusal(pgasdl.UnavailableError, lambda: ctx.segment(8, device="cuda:2"))
    assert seen == "device cuda:2: this process sees cuda:0 (Fake 0), cuda:1 (Fake 1)"
    ctx.barrier()
    segment.delete()
    refusal(pgasdl.SegmentError, lambda: segment.__cuda_array_interface__)
    refusal(pgasdl.SegmentError, lambda: segment.copy_to(bytearray(8)))
    ctx.barrier()


def main() -> None:
    first, second = gpus.survey().gpus
    assert (first.name, first.peers, second.peers) == ("Fake 0", [1], [0])
    assert (first.pci_address, first.sharing) == ("0000:10:00.0", "descriptor")
    assert first.uuid != second.uuid and len(first.uuid) == len("GPU-") + 36
    for program in (copies, interfaces, bound, refusals):
        loopback.run(2, program)
        print(program.__name__)


main()
