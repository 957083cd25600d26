"""``pgasdl.torch.Window``: put, signal and wait_signal as torch's windows have them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from tiers import full

torch = pytest.importorskip("torch")

from symmetric_programs import ring_through_windows  # noqa: E402
from torch_tools import WORLDS, ranks, run  # noqa: E402

import pgasdl  # noqa: E402
from pgasdl.torch import (  # noqa: E402
    Window,
    WindowAccessType,
    puts,
    symmetric_memory,
)

worlds = pytest.mark.parametrize("world", full(WORLDS, quick=2))
homes = pytest.mark.parametrize("home", ["symmetric", "plain", "mixed"])


def zeros(ctx: Any, home: str, count: int, dtype: torch.dtype = torch.int64) -> Any:
    """A tensor in a segment of all ranks, or not; mixed: on rank 0 only."""
    inside = symmetric_memory.empty(count, dtype=dtype, group=ctx)
    inside = inside if home == "symmetric" or ctx.rank == 0 else torch.zeros(count, dtype=dtype)
    return torch.zeros(count, dtype=dtype) if home == "plain" else inside


@worlds
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
@ranks(None, "world")
def test_a_ring(ctx: Any, world: str, async_op: bool, size: int) -> None:
    for count, dtype in ((4, torch.float32), (1024, torch.bfloat16), (400_000, torch.int8)):
        ring_through_windows(Window(ctx), ctx.rank, ctx.size, count, dtype, async_op)


@worlds
@homes
@ranks(2, "world")
def test_what_was_put_is_there_when_the_signal_is(ctx: Any, world: str, home: str) -> None:
    """Wherever the tensors lie, and though the source changes at once."""
    memory = zeros(ctx, home, 300)
    source = zeros(ctx, home, 100)
    window = Window(ctx, memory)
    for number in range(1, 20):
        if ctx.rank == 0:
            works = []
            for part in range(3):
                source.fill_(10 * number + part)
                work = window.put(source, 1, 100 * part, part == 1)
                works.append(work)
                if part == 1:
                    window.signal(1)
                    assert work.wait()
                assert work.is_completed()
            window.signal(1)
            source.fill_(-1)
            window.wait_signal(1)
        else:
            window.wait_signal(0)
            assert memory[:200].tolist() == [10 * number] * 100 + [10 * number + 1] * 100
            window.wait_signal(0)
            assert memory[200:].unique().tolist() == [10 * number + 2]
            window.signal(0)
    window.tensor_deregister()


@worlds
@ranks(2, "world")
def test_signals_count(ctx: Any, world: str) -> None:
    """Several may come before the first is waited for; each ends one wait."""
    window = Window(ctx, torch.zeros(1))
    peer = 1 - ctx.rank
    for number in (1, 5, 40):
        for _ in range(number):
            window.signal(peer)
        ctx.barrier()
        for _ in range(number):
            window.wait_signal(peer)
        with pytest.raises(
            pgasdl.PgasTimeoutError, match=f"no signal of rank {peer} within 0.01 s"
        ):
            window.wait_signal(peer, timeout=timedelta(milliseconds=10))
        ctx.barrier()
    waiting = window.wait_signal(peer, True, timeout=15)
    assert not waiting.is_completed()
    with pytest.raises(pgasdl.PgasTimeoutError):
        waiting.wait(0.01)
    ctx.barrier()
    window.signal(peer, True)
    assert waiting.wait(timedelta(seconds=15))
    assert waiting.is_completed()


def test_numbers_of_signals_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the greatest value of a notification."""
    monkeypatch.setattr(puts, "_VALUES", 7)

    def program(ctx: Any) -> None:
        window = Window(ctx, torch.zeros(1))
        peer = (ctx.rank + 1) % 3
        for _ in range(20):
            for _ in range(3):
                window.signal(peer)
            for _ in range(3):
                window.wait_signal((ctx.rank + 2) % 3)
            ctx.barrier()
        window.tensor_deregister()

    run(3, program)


@worlds
@ranks(3, "world")
def test_parts_of_any_size_and_dtype(ctx: Any, world: str) -> None:
    """Each rank's window is its own affair; what is put has to fit."""
    dtypes = (torch.float64, torch.int16, torch.float32)
    memory = torch.zeros(ctx.rank + 2, 2, dtype=dtypes[ctx.rank])
    window = Window(ctx, memory)
    for peer in range(3):
        window.put(torch.full((1,), ctx.rank + 1, dtype=dtypes[peer]), peer, ctx.rank)
        window.signal(peer)
    for peer in range(3):
        window.wait_signal(peer)
    assert memory.flatten()[:3].tolist() == [1, 2, 3]
    peer = (ctx.rank + 1) % 3
    count = 2 * (peer + 2)
    for source, first in (
        (torch.zeros(count + 1, dtype=dtypes[peer]), 0),
        (torch.zeros(1, dtype=dtypes[peer]), count),
        (torch.zeros(1, dtype=dtypes[peer]), -1),
        (torch.zeros(2, dtype=dtypes[peer]), 2**63),
    ):
        with pytest.raises(
            pgasdl.SegmentError,
            match=rf"at element {first} leaves the window of rank {peer}, which has {count}$",
        ):
            window.put(source, peer, first)
    with pytest.raises(pgasdl.BufferRefusedError, match=f"int8 into .* rank {peer}, which has"):
        window.put(torch.zeros(1, dtype=torch.int8), peer, 0)
    strided = torch.zeros(2, 2, dtype=dtypes[peer]).t()
    with pytest.raises(pgasdl.BufferRefusedError, match="not contiguous"):
        window.put(strided, peer, 0)
    window.put(torch.zeros(0, dtype=dtypes[peer]), peer, count)
    for nobody in (-1, 3):
        for call in (
            lambda nobody: window.put(memory, nobody, 0),
            window.signal,
            window.wait_signal,
            window.map_remote_tensor,
            window.get_attr,
        ):
            with pytest.raises(pgasdl.RankError, match="ranks are 0 to 2"):
                call(nobody)
    window.tensor_deregister()


@worlds
@ranks(2, "world")
def test_parts_without_elements(ctx: Any, world: str) -> None:
    for counts in ((0, 3), (0, 0)):
        memory = torch.zeros(counts[ctx.rank])
        window = Window(ctx, memory)
        peer = 1 - ctx.rank
        window.put(torch.ones(counts[peer]), peer, 0)
        window.signal(peer)
        window.wait_signal(peer)
        assert memory.tolist() == [1] * counts[ctx.rank]
        with pytest.raises(pgasdl.SegmentError, match="leaves the window"):
            window.put(torch.ones(1), peer, counts[peer])
        window.tensor_deregister()


@worlds
@homes
@ranks(2, "world")
def test_views_of_windows(ctx: Any, world: str, home: str) -> None:
    whole = zeros(ctx, home, 40, torch.int32)
    memory = whole[4 * ctx.rank + 8 :][:6].view(2, 3)  # elsewhere on each rank
    memory.fill_(ctx.rank + 7)
    window = Window(ctx, memory)
    assert window.map_remote_tensor(ctx.rank) is memory
    assert window.get_attr(ctx.rank).access_type is WindowAccessType.UNIFIED
    peer = 1 - ctx.rank
    if home == "symmetric" and ctx.mapped:
        assert window.get_attr(peer).access_type is WindowAccessType.UNIFIED
        view = window.map_remote_tensor(peer)
        assert torch.equal(view, torch.full((2, 3), peer + 7, dtype=torch.int32))
    else:
        assert window.get_attr(peer).access_type is WindowAccessType.SEPARATE
        with pytest.raises(pgasdl.UnavailableError, match="is not mapped here"):
            window.map_remote_tensor(peer)
    window.put(torch.full((2,), ctx.rank, dtype=torch.int32), peer, 4)
    window.signal(peer)
    window.wait_signal(peer)
    assert memory.flatten().tolist()[4:] == [peer] * 2
    assert whole.count_nonzero() == 6 - 2 * (peer == 0)
    assert repr(window) == f"<Window rank {ctx.rank} of 2, (2, 3)>"
    window.tensor_deregister()
    assert repr(window) == f"<Window rank {ctx.rank} of 2, no tensor>"


@worlds
@ranks(2, "world")
def test_registered_anew(ctx: Any, world: str) -> None:
    window = Window(ctx)
    for call in (
        lambda: window.put(torch.zeros(1), 0, 0),
        lambda: window.signal(0),
        lambda: window.wait_signal(0),
        lambda: window.map_remote_tensor(0),
        lambda: window.get_attr(0),
        window.tensor_deregister,
    ):
        with pytest.raises(pgasdl.ClosedError, match=r"tensor_register\(\) comes first"):
            call()
    peer = 1 - ctx.rank
    for number in range(3):
        memory = torch.zeros(3)
        window.tensor_register(memory, owning=number == 1)
        with pytest.raises(pgasdl.ClosedError, match=r"tensor_deregister\(\) comes first"):
            window.tensor_register(memory)
        window.put(torch.full((3,), number + 1.0), peer, 0, True)
        window.signal(peer)
        window.signal(peer)  # which nobody waits for
        window.wait_signal(peer)
        assert memory.tolist() == [number + 1] * 3
        window.tensor_deregister()


@ranks(2)
def test_collectives_go_on_after_a_timeout(ctx: Any) -> None:
    memory = torch.zeros(3)
    window = Window(ctx, timeout=0.05)
    calls = (lambda: window.tensor_register(memory), window.tensor_deregister)
    for late, call in enumerate(calls):
        if ctx.rank == late:
            with pytest.raises(pgasdl.PgasTimeoutError, match=f"rank {1 - late}|rank.*{1 - late}"):
                call()
        ctx.barrier()
        for _ in range(50):
            try:
                call()
            except pgasdl.PgasTimeoutError:
                continue
            break
        ctx.barrier()


@worlds
@ranks(3, "world")
def test_a_part_of_the_ranks(ctx: Any, world: str) -> None:
    inside = symmetric_memory.empty(2, dtype=torch.int64, group=ctx)
    part = ctx.group([1] if ctx.rank == 1 else [0, 2])
    small = symmetric_memory.empty(2, dtype=torch.int64, group=part)
    for memory in (inside, small, torch.zeros(2, dtype=torch.int64)):
        window = Window(part, memory)
        peer = (part.rank + 1) % part.size
        window.put(torch.full((2,), ctx.rank + 5), peer, 0)
        window.signal(peer)
        window.wait_signal(peer)
        assert memory.tolist() == [part.ranks[peer] + 5] * 2
        with pytest.raises(pgasdl.PgasTimeoutError, match="no signal of rank"):
            window.wait_signal(peer, timeout=0.01)
        window.tensor_deregister()
    # Memory of a part, in a window of all.
    window = Window(ctx, small)
    peer = (ctx.rank + 1) % 3
    window.put(torch.full((2,), ctx.rank), peer, 0)
    window.signal(peer)
    window.wait_signal((ctx.rank + 2) % 3)
    assert small.tolist() == [(ctx.rank + 2) % 3] * 2
    window.tensor_deregister()


@worlds
def test_a_lost_rank_ends_waits(world: str) -> None:
    def program(ctx: Any) -> None:
        window = Window(ctx, torch.zeros(3))
        if ctx.rank == 0:
            ready.wait(20)
            raise KeyError("lost")
        ready.set()
        for wait in (lambda: window.wait_signal(0), window.tensor_deregister):
            with pytest.raises(pgasdl.PeerLostError):
                wait()
        refused.append(True)

    ready, refused = threading.Event(), []
    with pytest.raises(KeyError, match="lost"):
        run(2, program, world)
    assert refused


@worlds
@ranks(2, "world")
def test_threads_that_put_to_one_peer(ctx: Any, world: str) -> None:
    """Staged tensors of several threads share their way."""
    memory = torch.zeros(4 * 20 * 50, dtype=torch.int64)
    window = Window(ctx, memory)

    def put(part: int) -> None:
        for number in range(20 * part, 20 * part + 20):
            window.put(torch.full((50,), number), 1, 50 * number)
        window.signal(1)

    if ctx.rank == 0:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(put, range(4)))
    else:
        for _ in range(4):
            window.wait_signal(0)
        assert torch.equal(memory, torch.arange(80).repeat_interleave(50))
    window.tensor_deregister()
