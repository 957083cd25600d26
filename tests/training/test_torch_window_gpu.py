"""Windows and symmetric memory on a GPU: a stand-in that shows missing orders."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
from tiers import full

torch = pytest.importorskip("torch")

import late_segments  # noqa: E402
from late_gpu import DEVICE, LateEvent, bare, gpu, on_gpu, on_host  # noqa: E402
from torch_tools import WORLDS, ranks, run  # noqa: E402

import pgasdl  # noqa: E402
from pgasdl.context import Context  # noqa: E402
from pgasdl.torch import Window, WindowAccessType  # noqa: E402
from pgasdl.torch import symmetric_memory as symm_mem  # noqa: E402

worlds = pytest.mark.parametrize("world", full(WORLDS, quick=2))
homes = pytest.mark.parametrize("home", ["symmetric", "plain", "mixed"])


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    late_segments.install(monkeypatch)


def filled(ctx: Any, home: str, count: int, value: int) -> Any:
    """A tensor on the GPU, which gets its numbers late; mixed: in a segment on rank 0 only."""
    if home != "plain":
        made = symm_mem.empty(count, dtype=torch.int64, device="cuda", group=ctx)
        if home == "symmetric" or ctx.rank == 0:
            return made.fill_(value)
    return on_gpu(torch.full((count,), value))


def values(tensor: Any) -> list[int]:
    """Those that the current stream finds."""
    found: list[int] = on_host(tensor).unique().tolist()
    return found


@worlds
@homes
@ranks(2, "world")
def test_what_was_put_is_there_when_the_signal_is(ctx: Any, world: str, home: str) -> None:
    """By which stream ever; and what was read is read before the answer is."""
    memory = filled(ctx, home, 300, 0)
    source, plain = filled(ctx, "symmetric", 100, 0), filled(ctx, "plain", 100, 0)
    host, kept = torch.zeros(100, dtype=torch.int64), filled(ctx, "plain", 300, 0)
    side = gpu.stream(DEVICE)
    window = Window(ctx, memory)
    for number in range(1, 8):
        if ctx.rank == 0:
            source.fill_(3 * number)
            window.put(source, 1, 0)
            source.fill_(-1)  # behind the copy
            plain.fill_(3 * number + 1)
            side.wait_stream(gpu.current(DEVICE))
            with gpu.on(side):
                work = window.put(plain, 1, 100, async_op=True)
            if number % 2:  # else the signal alone waits for the side's copy
                assert work.wait()
                assert work.is_completed()
                plain.fill_(-1)
                assert values(plain) == [-1]
            window.put(host.fill_(3 * number + 2), 1, 200)
            host.fill_(-1)
            window.signal(1)
            window.wait_signal(1)
        else:
            window.wait_signal(0)
            kept.copy_(memory)
            window.signal(0)
            parts = [values(kept[at : at + 100]) for at in (0, 100, 200)]
            assert parts == [[3 * number + part] for part in range(3)]
    window.tensor_deregister()


@worlds
@homes
@ranks(2, "world")
def test_a_put_follows_what_the_window_held(ctx: Any, world: str, home: str) -> None:
    """And is there once the tensor leaves the window."""
    memory = filled(ctx, home, 10, 7)
    window = Window(ctx, memory)
    if ctx.mapped:
        assert values(window.map_remote_tensor(1 - ctx.rank)[:5]) == [7]
    window.put(filled(ctx, "plain", 5, ctx.rank), 1 - ctx.rank, 5)
    window.tensor_deregister()
    if ctx.rank == 0:
        assert values(memory) == [1, 7]
    ctx.barrier()  # it lets no stream go on
    assert values(memory[:5]) == [7]
    assert values(memory[5:]) == [1 - ctx.rank]


@worlds
@homes
@ranks(2, "world")
def test_views_of_windows(ctx: Any, world: str, home: str) -> None:
    whole = filled(ctx, home, 40, 0)
    memory = whole[8 : 8 + 6 * (ctx.rank + 1)].view(2, -1)
    window, peer = Window(ctx, memory), 1 - ctx.rank
    assert window.map_remote_tensor(ctx.rank) is memory
    mapped = window.get_attr(peer).access_type is WindowAccessType.UNIFIED
    assert mapped == ctx.mapped
    if mapped:
        there = window.map_remote_tensor(peer)
        assert there.is_cuda and there.shape == (2, 3 * (peer + 1))
        there.fill_(ctx.rank + 1)
        window.signal(peer)
        window.wait_signal(peer)
        assert values(memory) == [peer + 1]
        assert int(bare(whole).count_nonzero()) == memory.numel()
    window.tensor_deregister()


@worlds
@ranks(2, "world")
def test_windows_of_one_tensor_leave_one_by_one(ctx: Any, world: str) -> None:
    memory, peer = filled(ctx, "plain", 10, 0), 1 - ctx.rank
    first, second = Window(ctx, memory), Window(ctx, memory)
    first.tensor_deregister()
    second.put(filled(ctx, "plain", 10, 3), peer, 0)
    second.signal(peer)
    second.wait_signal(peer)
    assert values(memory) == [3]
    second.tensor_deregister()


@worlds
@ranks(2, "world")
def test_between_the_host_and_the_gpu(ctx: Any, world: str) -> None:
    peer = 1 - ctx.rank
    memory = symm_mem.empty(4, dtype=torch.int64, group=ctx)
    window = Window(ctx, memory)
    source = filled(ctx, "plain", 4, ctx.rank + 5)
    window.put(source, peer, 0)
    source.fill_(-1)
    window.signal(peer)
    window.wait_signal(peer)
    assert memory.unique().tolist() == [peer + 5]
    window.tensor_deregister()


@ranks(2)
def test_parts_without_elements(ctx: Any) -> None:
    memory, peer = filled(ctx, "plain", 3 * ctx.rank, 0), 1 - ctx.rank
    window = Window(ctx, memory)
    window.put(filled(ctx, "plain", 3 * peer, 4), peer, 0)
    window.signal(peer)
    window.wait_signal(peer)
    assert values(memory) == [4] * ctx.rank
    window.tensor_deregister()


@worlds
@ranks(2, "world")
def test_symmetric_memory(ctx: Any, world: str) -> None:
    """Signals behind puts on any stream; a barrier behind stores."""
    buffer = symm_mem.empty(6, dtype=torch.int64, device=DEVICE, group=ctx)
    assert buffer.is_cuda
    buffer.fill_(ctx.rank)
    handle, peer = symm_mem.rendezvous(buffer, ctx), 1 - ctx.rank
    assert symm_mem.rendezvous(buffer[2:], ctx) is handle
    assert handle.device == DEVICE and handle.buffer_ptrs[ctx.rank] == buffer.data_ptr()
    assert not handle.get_signal_pad(ctx.rank).is_cuda
    if ctx.mapped and ctx.rank == 0:
        there = handle.get_remote_tensor(peer, (2, 3), torch.int64)
        assert there.is_cuda and values(there) == [peer]
    ctx.barrier()  # it lets no stream go on
    sources = filled(ctx, "symmetric", 6, 0), filled(ctx, "plain", 6, 0), torch.zeros(6).long()
    for number in range(6):
        if ctx.rank == 0:
            source = sources[number % 3].fill_(number)
            symm_mem.put_signal(source, handle, 1)
            source.fill_(-1)
            assert values(source) == [-1]
            handle.wait_signal(1, 1)
        else:
            symm_mem.wait_signal(handle, 0)
            kept = filled(ctx, "plain", 6, -2).copy_(buffer)
            handle.put_signal(0, 1)
            assert values(kept) == [number]
        if ctx.mapped:
            handle.get_buffer(peer, (3,), torch.int64, 3).fill_(10 * number + ctx.rank)
            handle.barrier(2)
            assert values(buffer[3:]) == [10 * number + peer]
            handle.barrier(3)


@ranks(1)
def test_memory_lives_until_streams_are_done(ctx: Any) -> None:
    memory, side = filled(ctx, "symmetric", 4, 9), gpu.stream(DEVICE)
    assert values(memory) == [9]
    gc.collect()  # earlier tests' memory
    with gpu.on(side):
        filled(ctx, "plain", 4, 9)  # stands for what uses the memory
    assert side.ran < side.enqueued
    del memory
    gc.collect()
    assert side.ran == side.enqueued


@homes
def test_no_signal_of_what_is_not_done(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(ctx: Any) -> None:
        window, peer = Window(ctx, filled(ctx, home, 4, 0)), 1 - ctx.rank
        handle = symm_mem.rendezvous(filled(ctx, "symmetric", 4, 0), ctx)
        ctx.barrier()
        window.put(filled(ctx, "plain", 4, 5), peer, 0)
        stuck.add(threading.get_ident())
        for call in (
            lambda: window.signal(peer, timeout=0.02),
            lambda: handle.put_signal(peer, timeout_ms=20),
            lambda: handle.barrier(timeout_ms=20),
        ):
            with pytest.raises(
                pgasdl.PgasTimeoutError, match=r"cuda:0 has not done .* within 0\.02 s"
            ):
                call()
        ctx.barrier()
        with pytest.raises(pgasdl.PgasTimeoutError, match="no signal"):
            window.wait_signal(peer, timeout=0.02)
        with pytest.raises(pgasdl.PgasTimeoutError, match="no signal"):
            handle.wait_signal(peer, timeout_ms=20)
        ctx.barrier()
        stuck.discard(threading.get_ident())
        window.signal(peer)
        window.wait_signal(peer)
        handle.barrier()
        window.tensor_deregister()

    stuck: set[int] = set()
    query = LateEvent.query
    monkeypatch.setattr(
        LateEvent, "query", lambda self: threading.get_ident() not in stuck and query(self)
    )
    run(2, program)


@ranks(2)
def test_what_is_refused(ctx: Any) -> None:
    memory, peer = filled(ctx, "symmetric", 4, 0), 1 - ctx.rank
    window, handle = Window(ctx, memory), symm_mem.rendezvous(memory, ctx)
    with gpu.capture():
        for call in (
            lambda: window.put(memory, peer, 0),
            lambda: window.signal(peer),
            lambda: handle.put_signal(peer),
            handle.barrier,
            window.tensor_deregister,
        ):
            with pytest.raises(pgasdl.UnavailableError, match="captured into a CUDA graph"):
                call()
    with pytest.raises(pgasdl.BufferRefusedError, match="float32 into the window"):
        window.put(on_gpu(torch.zeros(1)), peer, 0)
    with pytest.raises(pgasdl.BufferRefusedError, match="not contiguous"):
        window.put(memory[::2], peer, 0)
    with pytest.raises(pgasdl.BufferRefusedError, match="not made by symmetric_memory"):
        symm_mem.rendezvous(filled(ctx, "plain", 4, 0), ctx)
    bound = filled(ctx, "plain", 4, 0)
    ctx.bind(bound)
    with pytest.raises(pgasdl.BufferRefusedError, match="not made by symmetric_memory"):
        symm_mem.rendezvous(bound, ctx)
    with pytest.raises(pgasdl.MismatchError, match="rank 0's is on cpu, rank 1's is on cuda"):
        Window(ctx, memory if ctx.rank else torch.zeros(4))
    window.tensor_deregister()


def test_which_devices_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(ctx: Any, device: str, match: str) -> None:
        with pytest.raises(pgasdl.UnavailableError, match=match):
            symm_mem.empty(4, device=device, group=ctx)

    def program(ctx: Any) -> None:
        assert [symm_mem.get_backend(each) for each in ("cpu", "cuda", "meta")] == [
            "pgasdl",
            "pgasdl",
            None,
        ]
        refused(ctx, "cuda:3", "device cuda:3: this process sees")
        refused(ctx, "meta", "device meta: symmetric memory is the host's or CUDA's")
        monkeypatch.setattr(Context, "_why_unreached", lambda self, device: "PGASDL_GPU=staged")
        refused(ctx, "cuda", 'cuda: PGASDL_GPU=staged: pass device="cpu"')
        with pytest.raises(pgasdl.UnavailableError, match="window on cuda:0: PGASDL_GPU=staged"):
            Window(ctx, on_gpu(torch.zeros(4)))
        monkeypatch.setattr(torch.version, "cuda", None)
        assert symm_mem.get_backend("cuda") is None
        refused(ctx, "cuda", "this PyTorch has no CUDA")

    run(1, program)
