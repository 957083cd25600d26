"""``pgasdl.torch.symmetric_memory``: torch's verbs on segments."""

from __future__ import annotations

import gc
import inspect
import re
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import pytest
from support.ranks import on_ranks
from tiers import full

torch = pytest.importorskip("torch")

from symmetric_programs import (  # noqa: E402
    one_shot_all_reduce,
    ring_of_puts,
    ring_through_buffers,
)
from torch_tools import WORLDS, ranks, run  # noqa: E402

import pgasdl  # noqa: E402
from pgasdl import loopback  # noqa: E402
from pgasdl.torch import symmetric_memory as symm_mem  # noqa: E402

worlds = pytest.mark.parametrize("world", full(WORLDS, quick=1))


def parameters(docstring: str) -> list[str]:
    """Names in the first line of a compiled function's documentation, without self."""
    return re.findall(r"[(,] ?(\w+): ", docstring.split(" -> ", maxsplit=1)[0])[1:]


def test_names_and_their_order_are_torchs() -> None:
    theirs = pytest.importorskip("torch.distributed._symmetric_memory")
    here = {name for name in symm_mem.__all__ if hasattr(theirs, name)}
    assert set(symm_mem.__all__) - here <= {"SymmetricMemory", "is_symm_mem_tensor"}  # not in 2.11
    for name in here - {"SymmetricMemory"}:
        wanted = list(inspect.signature(getattr(theirs, name)).parameters)
        own = list(inspect.signature(getattr(symm_mem, name)).parameters)
        assert own[: len(wanted)] == wanted, name
        assert own[len(wanted) :] == ["group"] * (name == "empty")
    for name in (
        "barrier", "get_buffer", "get_remote_tensor", "get_signal_pad", "put_signal", "wait_signal"
    ):  # fmt: skip
        wanted = parameters(getattr(theirs._SymmetricMemory, name).__doc__)
        own = list(inspect.signature(getattr(symm_mem.SymmetricMemory, name)).parameters)[1:]
        assert own == wanted, name


def made(ctx: Any, *size: int, **options: Any) -> Any:
    """A tensor and its handle."""
    tensor = symm_mem.empty(*size, group=ctx, **options)
    return tensor, symm_mem.rendezvous(tensor, ctx)


@pytest.mark.parametrize("size", full([3, 1, 2, 4], quick=1))
def test_programs_between_processes(forked: Callable[..., str], size: int, tmp_path: Path) -> None:
    """Through the import alone, in torch's groups, too."""
    program = jobs.PROGRAMS / "symmetric_memory.py"
    shown = forked(size, program, tmp_path / "store")
    assert shown == f"[0] {size} ranks are right, mapped True\n"


@worlds
@pytest.mark.parametrize("size", full([3, 1, 2], quick=1))
@ranks(None, "world")
def test_programs_between_threads(ctx: Any, world: str, size: int) -> None:
    words = SimpleNamespace(**{name: getattr(symm_mem, name) for name in symm_mem.__all__})
    words.empty = partial(symm_mem.empty, group=ctx)
    if ctx.mapped:
        one_shot_all_reduce(words, ctx)
        ring_through_buffers(words, ctx)
    ring_of_puts(words, ctx)
    ring_of_puts(words, ctx, 2, 300_000)  # more than passes through at once


@worlds
@ranks(2, "world")
def test_what_a_handle_tells(ctx: Any, world: str) -> None:
    tensor, handle = made(ctx, 4, 6, dtype=torch.float64)
    assert tensor.shape == (4, 6)
    assert not tensor.any()
    assert (handle.rank, handle.world_size) == (ctx.rank, 2)
    assert handle.buffer_size == 4 * 6 * 8
    assert handle.signal_pad_size == symm_mem.get_signal_pad_size() == 9216
    assert (handle.offset, handle.multicast_ptr) == (0, 0)
    assert handle.device == tensor.device
    assert handle.buffer_ptrs[ctx.rank] == tensor.data_ptr()
    assert all(handle.buffer_ptrs) == all(handle.signal_pad_ptrs) == ctx.mapped
    assert repr(handle) == f"<SymmetricMemory rank {ctx.rank} of 2, 192 bytes>"
    assert symm_mem.empty((2, 3), group=ctx).shape == (2, 3)
    assert symm_mem.empty(torch.Size([5]), group=ctx).dtype == torch.get_default_dtype()
    assert symm_mem.get_backend("cpu") == "pgasdl"
    assert symm_mem.get_backend("meta") is None


@worlds
@ranks(2, "world")
def test_buffers_have_any_dtype_and_stay_inside(ctx: Any, world: str) -> None:
    tensor, handle = made(ctx, 12, dtype=torch.float32)
    tensor.copy_(torch.arange(12) + 100 * ctx.rank)
    handle.barrier()
    for rank in range(2) if ctx.mapped else [ctx.rank]:
        want = torch.arange(12, dtype=torch.float32) + 100 * rank
        assert torch.equal(handle.get_buffer(rank, (3, 4), torch.float32), want.view(3, 4))
        assert torch.equal(handle.get_buffer(rank, [2], torch.float32, 10), want[10:])
        assert torch.equal(handle.get_buffer(rank, (6,), torch.int64), want.view(torch.int64))
        assert torch.equal(handle.get_remote_tensor(rank, (5,), torch.float32), want[:5])
        assert handle.get_buffer(rank, (0,), torch.int8, 48).numel() == 0
        whole = handle.get_buffer(rank, (12,), torch.float32)
        assert whole.untyped_storage().size() == handle.buffer_size
        for sizes, dtype, offset in (
            ((13,), torch.float32, 0),
            ((2,), torch.float32, 11),
            ((7,), torch.int64, 0),
            ((1,), torch.float32, -1),
            ((-1,), torch.float32, 0),
            ((1,), torch.int8, 2**62),
        ):
            with pytest.raises(pgasdl.SegmentError, match="leaves the 48 bytes"):
                handle.get_buffer(rank, sizes, dtype, offset)
    if not ctx.mapped:
        with pytest.raises(pgasdl.UnavailableError, match="is not mapped here"):
            handle.get_buffer(1 - ctx.rank, (3, 4), torch.float32)
    for nobody in (-1, 2):
        for call in (
            lambda nobody: handle.get_buffer(nobody, (1,), torch.int8),
            handle.get_signal_pad,
            handle.put_signal,
            handle.wait_signal,
        ):
            with pytest.raises(pgasdl.RankError, match="ranks are 0 to 1"):
                call(nobody)
    handle.barrier()


@worlds
@ranks(2, "world")
def test_one_handle_for_all_views_of_one_memory(ctx: Any, world: str) -> None:
    tensor, handle = made(ctx, 8, 8)
    for other in (
        tensor,
        tensor[2:, 3:],
        tensor.t(),
        tensor.view(torch.int32),
        tensor.detach(),
    ):
        assert symm_mem.rendezvous(other, ctx) is handle
        assert symm_mem.rendezvous(other, ctx.world) is handle
    other, another = made(ctx, 8, 8)
    assert another is not handle
    tensor[3, 4] = 5 + ctx.rank
    assert handle.get_buffer(ctx.rank, (1,), torch.float32, 28).item() == 5 + ctx.rank
    assert not other.any()


def test_memory_lives_as_long_as_its_tensors_and_handle() -> None:
    def program(ctx: Any) -> None:
        tensor, handle = made(ctx, 100, dtype=torch.int8)
        tensor.fill_(7)
        segment = weakref.ref(handle._segment)
        del tensor
        with collecting:
            gc.collect()
        assert handle.get_buffer(ctx.rank, (100,), torch.int8).unique().tolist() == [7]
        view = handle.get_buffer(1 - ctx.rank, (100,), torch.int8)
        handle.barrier()
        del handle
        with collecting:
            gc.collect()
        assert segment() is not None
        assert view.unique().tolist() == [7]
        ctx.barrier()
        del view
        with collecting:  # a collection does nothing while another thread's is under way
            gc.collect()
        assert segment() is None

    collecting = threading.Lock()
    run(2, program)


@worlds
@ranks(2, "world")
def test_a_signal_waits_until_the_last_one_was_taken(ctx: Any, world: str) -> None:
    _, handle = made(ctx, 4)
    if ctx.rank == 0:
        handle.put_signal(1, 5)
        handle.put_signal(1, 6)
        with pytest.raises(
            pgasdl.PgasTimeoutError,
            match=r"rank 1 has not taken the last signal of rank 0 on channel 5 within 0.05 s",
        ):
            handle.put_signal(1, 5, 50)
        ctx.barrier()
        handle.put_signal(1, channel=5, timeout_ms=15000)
        handle.wait_signal(1, 9)
    else:
        ctx.barrier()
        for _ in range(2):
            handle.wait_signal(src_rank=0, channel=5, timeout_ms=15000)
        handle.wait_signal(0, 6)
        with pytest.raises(
            pgasdl.PgasTimeoutError, match=r"no signal of rank 0 on channel 6 within 0.02 s"
        ):
            handle.wait_signal(0, 6, 20)
        handle.put_signal(0, 9)
    handle.put_signal(ctx.rank)
    handle.wait_signal(ctx.rank)
    handle.barrier()


@worlds
@ranks(2, "world")
def test_signals_follow_what_was_put(ctx: Any, world: str) -> None:
    """From a tensor in a segment, whose bytes the transport reads late, and from any other."""
    tensor, handle = made(ctx, 1000, dtype=torch.int64)
    source = symm_mem.empty(1000, dtype=torch.int64, group=ctx)
    plain = torch.zeros(1000, dtype=torch.int64)
    for number in range(20):
        if ctx.rank == 0:
            sent = (source, plain)[number % 2]
            sent.fill_(number)
            symm_mem.put_signal(sent, handle, 1)
            sent.fill_(-1)
            handle.wait_signal(1, 1)
        else:
            symm_mem.wait_signal(handle, 0)
            assert tensor.unique().tolist() == [number]
            handle.put_signal(0, 1)
    if ctx.rank == 0:
        with pytest.raises(pgasdl.SegmentError, match="leaves segment"):
            symm_mem.put_signal(torch.zeros(1001, dtype=torch.int64), handle, 1)
        with pytest.raises(pgasdl.BufferRefusedError, match="not contiguous"):
            symm_mem.put_signal(torch.zeros(10, 10).t(), handle, 1)
    handle.barrier()


@worlds
@ranks(3, "world")
def test_channels_end_where_the_pad_does(ctx: Any, world: str) -> None:
    _, handle = made(ctx, 4)
    last = 9216 // 4 // 3 - 1
    for channel in (-1, last + 1, 2**40):
        for call in (
            lambda channel: handle.put_signal(0, channel),
            lambda channel: handle.wait_signal(0, channel),
            handle.barrier,
        ):
            with pytest.raises(
                pgasdl.NotificationError, match=f"channel {channel}: channels are 0 to {last}"
            ):
                call(channel)
    handle.put_signal((ctx.rank + 1) % 3, last)
    handle.wait_signal((ctx.rank + 2) % 3, last)
    handle.barrier(last)


@worlds
@ranks(2, "world")
def test_signal_pads_are_the_programs_own(ctx: Any, world: str) -> None:
    _, handle = made(ctx, 4)
    pad = handle.get_signal_pad(ctx.rank)
    assert (pad.dtype, pad.shape) == (torch.uint32, (2304,))
    assert handle.get_signal_pad(ctx.rank, (2, 3), torch.int64, 7).shape == (2, 3)
    with pytest.raises(pgasdl.SegmentError, match="leaves the 9216 bytes"):
        handle.get_signal_pad(ctx.rank, (1,), torch.int64, 1152)
    for channel in range(4):
        handle.put_signal(1 - ctx.rank, channel)
        handle.wait_signal(1 - ctx.rank, channel)
        handle.barrier(channel)
    assert not pad.view(torch.int32).any()
    ctx.barrier()
    if ctx.mapped:
        handle.get_signal_pad(1 - ctx.rank, (2,), torch.int32, 3)[1] = 5 + ctx.rank
        handle.barrier()
        assert pad[4].item() == 5 + 1 - ctx.rank


def test_the_size_of_signal_pads() -> None:
    def program(ctx: Any) -> int:
        return int(made(ctx, 4)[1].n_channels)

    size = symm_mem.get_signal_pad_size()
    try:
        symm_mem.set_signal_pad_size(4096)
        assert symm_mem.get_signal_pad_size() == 4096
        assert run(2, program) == [512, 512]
        with pytest.raises(pgasdl.ConfigError, match="at least 4"):
            symm_mem.set_signal_pad_size(0)
    finally:
        symm_mem.set_signal_pad_size(size)


@worlds
@pytest.mark.parametrize("size", full([3, 1, 2, 5], quick=1))
def test_nobody_leaves_a_barrier_early(world: str, size: int) -> None:
    def program(ctx: Any) -> None:
        _, handle = made(ctx, 4)
        for number in range(15):
            with lock:
                came[number] += 1
            handle.barrier(number % 2)
            assert came[number] == size

    lock, came = threading.Lock(), [0] * 15
    run(size, program, world)


@pytest.mark.parametrize("mapped", [True, False])
@on_ranks(3, "mapped", timeout=20, seed=3, delay=60)
def test_after_a_barrier_every_put_is_seen_by_all(ctx: Any, mapped: bool) -> None:
    """Rank 0 puts to rank 2, where it arrives late; after the barrier rank 1 reads it there."""
    tensor, handle = made(ctx, 3, dtype=torch.int64)
    inbox = ctx.segment(24)
    for number in range(1, 20):
        if ctx.rank == 0:
            tensor[1] = number
            handle._puts.put(tensor, 2, 0, None)
        handle.barrier()
        if ctx.rank == 1:
            ctx.read(inbox[0:24], 2, handle._segment[0:24])
            ctx.wait()
            assert inbox.numpy("int64").tolist() == [0, number, 0]
        handle.barrier(1)


@worlds
@ranks(3, "world")
def test_a_barrier_goes_on_after_a_timeout(ctx: Any, world: str) -> None:
    _, handle = made(ctx, 4)
    for _ in range(3):
        if ctx.rank == 1:
            for wanted in (r"channel 7: rank [02] is not there after 0\.03 s",) * 2:
                with pytest.raises(pgasdl.PgasTimeoutError, match=wanted):
                    handle.barrier(7, 30)
        ctx.barrier()
        if ctx.rank == 2:
            time.sleep(0.01)
        handle.barrier(7)


@worlds
@ranks(2, "world")
def test_threads_on_channels_of_their_own(ctx: Any, world: str) -> None:
    tensor, handle = made(ctx, 4, dtype=torch.int64)
    peer = 1 - ctx.rank

    def talk(channel: int) -> None:
        for number in range(30):
            if ctx.mapped:
                there = handle.get_buffer(peer, (1,), torch.int64, channel)
                there.fill_(1000 * channel + number)
            handle.put_signal(peer, channel)
            handle.wait_signal(peer, channel)
            if ctx.mapped:
                assert tensor[channel] == 1000 * channel + number
            handle.barrier(channel)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(talk, range(4)))


@worlds
@ranks(3, "world")
def test_a_part_of_the_ranks(ctx: Any, world: str) -> None:
    """A handle of a part has signals of its own, and counts ranks inside the part."""
    tensor, all_of = made(ctx, 4, dtype=torch.int64)
    part = ctx.group([1] if ctx.rank == 1 else [0, 2])
    handle = symm_mem.rendezvous(tensor, part)
    assert handle is not all_of
    assert symm_mem.rendezvous(tensor[1:], part) is handle
    assert (handle.rank, handle.world_size) == (part.rank, part.size)
    peer = (handle.rank + 1) % handle.world_size
    symm_mem.put_signal(torch.full((4,), ctx.rank), handle, peer)
    symm_mem.wait_signal(handle, peer)
    assert tensor.tolist() == [part.ranks[peer]] * 4
    handle.barrier()
    if part.size == 2:
        with pytest.raises(
            pgasdl.PgasTimeoutError, match=r"rank 1 \(rank 2 of the job\)|rank 0 on"
        ):
            handle.wait_signal(peer, 0, 10)
        small = symm_mem.empty(4, group=part)
        with pytest.raises(pgasdl.RankError, match="rank 1 has no copy"):
            symm_mem.rendezvous(small, ctx)
    all_of.barrier()


@worlds
@ranks(2, "world")
def test_a_rank_that_signalled_may_leave(ctx: Any, world: str) -> None:
    _, handle = made(ctx, 4)
    if ctx.rank == 0:
        handle.put_signal(1)
    else:
        while ctx.health()[0] == "healthy":
            time.sleep(0.01)
        handle.wait_signal(0)
        with pytest.raises(pgasdl.PeerLostError):
            handle.put_signal(0)


@worlds
def test_a_lost_rank_ends_waits(world: str) -> None:
    def program(ctx: Any) -> None:
        _, handle = made(ctx, 4)
        if ctx.rank == 0:
            ready.wait(20)
            raise KeyError("lost")
        ready.set()
        for wait in (handle.wait_signal, handle.barrier):
            with pytest.raises(pgasdl.PeerLostError):
                wait(0)
        refused.append(True)

    ready, refused = threading.Event(), []
    with pytest.raises(KeyError, match="lost"):
        run(2, program, world)
    assert refused


@ranks(2)
def test_unequal_memory_is_refused_everywhere(ctx: Any) -> None:
    for shape, dtype in (((4 + ctx.rank,), torch.float32), ((4,), torch.int32)):
        if ctx.rank == 1 or dtype == torch.float32:
            tensor = symm_mem.empty(shape, dtype=dtype, group=ctx)
        else:
            tensor = symm_mem.empty(4, dtype=torch.float32, group=ctx)
        with pytest.raises(pgasdl.MismatchError, match=r"rank 0: \(4,\) torch.float32.*rank 1"):
            symm_mem.rendezvous(tensor, ctx)
    made(ctx, 4)


def test_a_rendezvous_goes_on_after_a_timeout() -> None:
    def program(ctx: Any) -> None:
        tensor = symm_mem.empty(4, group=ctx)
        if ctx.rank == 0:
            with pytest.raises(pgasdl.PgasTimeoutError, match="1"):
                symm_mem.rendezvous(tensor, ctx)
            came.set()
        else:
            came.wait(20)
        symm_mem.rendezvous(tensor, ctx).barrier()

    came = threading.Event()
    run(2, program, timeout=1)


def test_what_is_refused() -> None:
    def program(ctx: Any) -> None:
        plain = torch.zeros(4)
        segment = ctx.segment(64)
        for tensor in (
            plain,
            segment.torch(offset=8),
            torch.zeros(0),
            torch.zeros(2, device="meta"),
        ):
            with pytest.raises(
                pgasdl.BufferRefusedError, match=r"not made by symmetric_memory\.empty"
            ):
                symm_mem.rendezvous(tensor, ctx)
        with pytest.raises(pgasdl.UnavailableError, match=r'device meta: .* device="cpu"'):
            symm_mem.empty(4, device="meta", group=ctx)
        for shape in (0, (3, 0)):
            with pytest.raises(pgasdl.BufferRefusedError, match="no memory to share"):
                symm_mem.empty(shape, group=ctx)
        with pytest.raises(TypeError, match="not int"):
            symm_mem.rendezvous(symm_mem.empty(4, group=ctx), 3)  # type: ignore[arg-type]

    loopback.run(1, program)
    with pytest.raises(pgasdl.ClosedError, match="no open context"):
        symm_mem.empty(4)
    assert not symm_mem.is_symm_mem_tensor(torch.zeros(4))
