"""Segments: creation, sizes, views, deletion, the caller's memory."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import weakref
from typing import Any

import numpy as np
import pytest
from contract_harness import ORDERING, PROCESSES, contract

import pgasdl


@contract(ranks=(1, 2))
def test_fresh_memory(ctx: Any) -> None:
    for nbytes in (0, 1, 7, 4096, 4097, 1 << 20):
        segment = ctx.segment(nbytes)
        assert segment.nbytes == len(segment.numpy()) == nbytes
        assert not segment.numpy().any()
        assert [segment.nbytes_of(peer) for peer in range(ctx.size)] == [nbytes] * ctx.size
        if nbytes:
            assert segment.address % 4096 == 0
    for nbytes in (-1, 2**47, 2**63, 2**64, 2**80):
        with pytest.raises(pgasdl.SegmentError):
            ctx.segment(nbytes, timeout=5)
    for number in (-1, 2**28 + 1, 2**32, 2**64):
        with pytest.raises(pgasdl.NotificationError):
            ctx.segment(8, notifications=number, timeout=5)
    with pytest.raises(pgasdl.UnavailableError):
        ctx.segment(8, device="cuda")
    ctx.barrier()
    assert ctx.segment(8).nbytes == 8


@contract(ranks=3)
def test_sizes_differ(ctx: Any) -> None:
    """The same segment is larger on some ranks; the size of the target's copy is the bound."""
    size = 1000 * (ctx.rank + 1)
    segment = ctx.segment(size, notifications=10 * (ctx.rank + 1))
    source = ctx.segment(3000)
    source.numpy()[:] = ctx.rank + 1
    for peer in range(ctx.size):
        assert segment.nbytes_of(peer) == 1000 * (peer + 1)
        end = 1000 * (peer + 1)
        at = end - ctx.size + ctx.rank
        ctx.write_notify(source[0:1], peer, segment[at : at + 1], 10 * (peer + 1) - 3 + ctx.rank)
        with pytest.raises(pgasdl.SegmentError):
            ctx.write(source[0:1], peer, segment[end : end + 1])
    for sender in range(ctx.size):
        assert ctx.notify_waitsome(segment, segment.notifications - 3 + sender, 1) is not None
    assert segment.numpy()[-3:].tolist() == [1, 2, 3]
    assert not segment.numpy()[:-3].any()


@contract(ranks=3)
def test_views_of_peers(ctx: Any) -> None:
    """Loads and stores where a peer's copy is mapped; else an error that says what to do."""
    segment = ctx.segment(100 + ctx.rank, notifications=ctx.size)
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    assert segment.address_of(ctx.rank) == segment.address
    if segment.address_of(right):
        there = segment.numpy("int32", 4, (2, 3), peer=right)
        assert there.shape == (2, 3)
        assert len(segment.numpy(peer=right)) == 100 + right
        there[:] = ctx.rank
        ctx.notify(right, segment, ctx.rank)
        assert ctx.notify_waitsome(segment, left, 1) == left
        assert (segment.numpy("int32", 4, 6) == left).all()
        kept = segment.numpy(peer=right)
        ctx.barrier()
        del segment, there
        gc.collect()
        ctx.barrier()
        assert kept[4] == ctx.rank
    else:
        assert not ctx.mapped
        with pytest.raises(pgasdl.UnavailableError, match=r"is not mapped here.*ctx\.read"):
            segment.numpy(peer=right)
        with pytest.raises(pgasdl.SegmentError, match=f"of {100 + right} bytes on rank {right}"):
            segment.numpy(shape=100 + right + 1, peer=right)
        ctx.barrier()
        ctx.barrier()
    part = ctx.segment(8, group=ctx.group([ctx.rank]))
    with pytest.raises(pgasdl.RankError, match=f"rank {right} has no copy"):
        part.numpy(peer=right)
    for nobody in (-1, ctx.size):
        with pytest.raises(pgasdl.RankError):
            part.numpy(peer=nobody)
    ctx.barrier()


@contract(ranks=2)
def test_views_share_memory(ctx: Any) -> None:
    segment = ctx.segment(64)
    floats = segment.numpy("float32", offset=16, shape=(2, 3))
    floats[:] = np.arange(6).reshape(2, 3)
    assert memoryview(segment).nbytes == 64
    assert np.frombuffer(segment, np.float32, 6, 16).tolist() == list(range(6))
    assert np.from_dlpack(segment)[16:40].tobytes() == floats.tobytes()
    memoryview(segment)[63] = 9
    assert segment.numpy()[63] == 9
    assert segment.numpy("bfloat16", shape=3).nbytes == 6
    assert segment.numpy(np.float64).shape == (8,)
    assert segment.numpy(shape=0).size == 0
    for bad in (
        {"offset": 65}, {"offset": -1}, {"shape": 65}, {"shape": -1}, {"offset": 60, "shape": 5},
        {"dtype": np.float64, "shape": 9}, {"shape": (2**40, 2**40)}, {"offset": 2**63},
    ):  # fmt: skip
        with pytest.raises(pgasdl.SegmentError):
            segment.numpy(**bad)


@contract(ranks=2)
def test_torch_views(ctx: Any) -> None:
    torch = pytest.importorskip("torch")
    segment = ctx.segment(64)
    tensor = segment.torch(torch.bfloat16, offset=32, shape=(2, 4))
    tensor.fill_(1.5)
    assert segment.numpy("bfloat16", 32).tolist()[:8] == [1.5] * 8
    shared = torch.from_dlpack(segment)
    shared[0] = 77
    assert segment.numpy()[0] == 77
    assert torch.frombuffer(segment, dtype=torch.uint8)[0] == 77
    assert segment.torch().shape == (64,)


@contract(ranks=2)
def test_views_outlive_deletion(ctx: Any) -> None:
    """Views keep the memory; a deleted segment refuses whatever would touch this rank's copy."""
    segment = ctx.segment(8192)
    view, raw = segment.numpy(), memoryview(segment)
    view[:] = ctx.rank + 1
    ctx.barrier()
    refuses_when_deleted(ctx, segment)
    del segment
    gc.collect()
    assert (view == ctx.rank + 1).all()
    assert raw[8191] == ctx.rank + 1
    view[:] = 5


def refuses_when_deleted(ctx: Any, segment: Any) -> None:
    piece, peer = segment[0:8], 1 - ctx.rank
    segment.delete()
    assert segment.deleted
    assert "deleted" in repr(segment)
    for use in (
        segment.delete,
        segment.numpy,
        lambda: ctx.write(piece, peer, piece),
        lambda: ctx.read(piece, peer, piece),
        lambda: ctx.notify_waitsome(segment, timeout=0),
        lambda: ctx.notify_reset(segment, 0),
        lambda: ctx.read_notify(piece, peer, piece, 0),
    ):
        with pytest.raises(pgasdl.SegmentError, match="deleted"):
            use()
    with pytest.raises(BufferError):
        memoryview(segment)


@contract(ranks=2, on=PROCESSES, bare=True)
def test_views_outlive_the_context(join: Any) -> None:
    ctx = join()
    segment = ctx.segment(1 << 16)
    view = segment.numpy(np.int64)
    view[:] = 11
    bound = ctx.bind(np.ones(100))
    ctx.barrier()
    ctx.close()
    del ctx, segment, bound
    gc.collect()
    assert (view == 11).all()
    view[:] = 12


@contract(ranks=2)
def test_create_same_and_reuse(ctx: Any) -> None:
    """create, write_notify, delete, create larger ... (1000 rounds scaled to 50); ids are new."""
    ids = set()
    for turn in range(50):
        nbytes = 1024 * (1 + turn % 2)
        segment = ctx.segment(nbytes, notifications=4)
        segment.numpy()[:] = 0
        ids.add(segment.id)
        source = ctx.segment(nbytes, notifications=0)
        source.numpy()[:] = turn + ctx.rank
        ctx.write_notify(source[0:nbytes], 1 - ctx.rank, segment[0:nbytes], 1, turn + 1)
        assert ctx.notify_waitsome(segment) == 1
        assert ctx.notify_reset(segment, 1) == turn + 1
        assert (segment.numpy() == turn + 1 - ctx.rank).all()
        ctx.wait()
        segment.delete()
        source.delete()
    assert len(ids) == 50


@contract(ranks=2)
def test_many_segments(ctx: Any) -> None:
    """10,000 small segments, scaled to 2000 over shm and to 300 over other transports."""
    n = 2000 if ctx.transport_of(0) == "shm" else 300
    segments = [ctx.segment(16, notifications=1) for _ in range(n)]
    peer = 1 - ctx.rank
    for number in range(0, n, 7):
        segments[number].numpy(np.int32)[0] = number
        ctx.write_notify(segments[number][0:4], peer, segments[number][8:12], 0)
    for number in range(0, n, 7):
        assert ctx.notify_waitsome(segments[number]) == 0
        assert segments[number].numpy(np.int32)[2] == number
    ctx.wait()
    ctx.barrier()
    for segment in segments:
        segment.delete()


def machine_memory() -> int:
    """The memory of the machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contract(ranks=2)
def test_beyond_four_gib(ctx: Any) -> None:
    """Offsets of 33 bits, in 5 GiB of which only a few pages are touched."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < 24 << 30:
        pytest.skip(f"the address space is limited to {limit} bytes")
    nbytes = (5 << 30) + 16
    peer = 1 - ctx.rank
    if ctx.transport_of(peer) == "verbs" and machine_memory() < 3 * nbytes:
        pytest.skip(f"{nbytes} bytes are pinned on every rank: not enough memory")
    segment = ctx.segment(nbytes)
    view = segment.numpy()
    far = (4 << 30) + 8
    view[far : far + 8] = ctx.rank + 1
    for at in (nbytes - 8, (4 << 30) - 4, 2**31 - 4):
        ctx.write(segment[far : far + 8], peer, segment[at : at + 8])
    ctx.notify(peer, segment, 0)
    assert ctx.notify_waitsome(segment) == 0
    for at in (nbytes - 8, (4 << 30) - 4, 2**31 - 4):
        assert (view[at : at + 8] == peer + 1).all()
    ctx.read(segment[0:8], peer, segment[far : far + 8])
    ctx.wait()
    assert (view[:8] == peer + 1).all()
    assert ctx.atomic_fetch_add(segment[(4 << 30) + 64 : (4 << 30) + 72], peer, 3) == 0
    with pytest.raises(pgasdl.SegmentError):
        ctx.write(segment[0:8], peer, segment[nbytes - 7 : nbytes + 1])
    ctx.barrier()
    assert view[(4 << 30) + 64] == 3
    assert view[64] == 0  # what a 32-bit offset would have hit


@contract(ranks=2)
def test_bound_memory(ctx: Any) -> None:
    """The caller's array as a segment: peers reach it; afterwards it is the caller's again."""
    array = np.arange(1000, dtype=np.float64) * (ctx.rank + 1)
    segment = ctx.bind(array, notifications=4)
    assert segment.bound
    assert segment.nbytes == array.nbytes
    assert segment.address == array.ctypes.data
    inbox = ctx.segment(8000)
    peer = 1 - ctx.rank
    ctx.read(inbox[0:8000], peer, segment[0:8000])
    ctx.wait()
    assert (inbox.numpy(np.float64) == np.arange(1000) * (peer + 1)).all()
    ctx.barrier()
    ctx.write_notify(segment[0:800], peer, segment[7200:8000], 3, 6)
    assert ctx.notify_waitsome(segment) == 3
    ctx.wait()
    ctx.barrier()
    assert (array[900:] == np.arange(100) * (peer + 1)).all()
    assert (array[:900] == np.arange(900) * (ctx.rank + 1)).all()
    with pytest.raises(pgasdl.SegmentError):
        ctx.write(inbox[0:8], peer, segment[7993:8001])
    kept = array.copy()
    ctx.barrier()
    segment.delete()
    assert (array == kept).all()


@contract(ranks=2)
def test_bind_anything_that_has_memory(ctx: Any) -> None:
    for buffer in (bytearray(64), memoryview(bytearray(64)), np.zeros((4, 4), np.float32)):
        segment = ctx.bind(buffer)
        segment.numpy()[:] = 3
        assert bytes(buffer) == b"\3" * 64
    inner = ctx.segment(4096)
    part = ctx.bind(inner.numpy()[1024:2048])  # a segment inside of a segment
    part.numpy()[:] = ctx.rank + 1
    peer = 1 - ctx.rank
    out = ctx.segment(1024)
    ctx.barrier()
    ctx.read(out[0:1024], peer, inner[1024:2048])
    ctx.wait()
    assert (out.numpy() == peer + 1).all()
    assert ctx.bind(np.zeros(0)).nbytes == 0


@contract(ranks=2)
def test_bound_memory_is_not_resized(ctx: Any) -> None:
    """Also where its binding ended half way, until the segment and its views are gone."""
    flag, buffer = ctx.segment(0), bytearray(64)
    if ctx.rank == 0:
        with pytest.raises(pgasdl.PgasTimeoutError):
            ctx.bind(buffer, timeout=0)
        with pytest.raises(BufferError):
            buffer.append(0)
        ctx.notify(1, flag, 0)
    else:
        ctx.notify_waitsome(flag)
    segment = ctx.bind(buffer)
    view = segment.numpy()
    ctx.barrier()
    segment.delete()
    del segment
    with pytest.raises(BufferError):
        buffer.append(0)
    del view
    gc.collect()
    buffer.append(0)


@contract(ranks=2)
def test_bind_refuses(ctx: Any) -> None:
    frozen = np.zeros(8)
    frozen.flags.writeable = False
    for buffer in (np.zeros((4, 4)).T, np.zeros(8)[::2], frozen, b"bytes", "text", 5, None, [1, 2]):
        with pytest.raises(pgasdl.BufferRefusedError):
            ctx.bind(buffer)


@contract(ranks=2)
def test_bound_memory_stays_until_it_is_deleted(ctx: Any) -> None:
    """The rank whose memory is read needs to keep neither the array nor the segment."""
    segment = ctx.bind(np.full(100_000, ctx.rank + 1.0))
    out = ctx.segment(800_000)
    array = weakref.ref(ctx.segments.kept[segment.id]._owner)
    if ctx.rank == 0:
        identity = segment.id
        del segment
    gc.collect()
    ctx.barrier()
    if ctx.rank == 1:
        ctx.read(out[0:800_000], 0, segment[0:800_000])
        ctx.wait()
        assert (out.numpy(np.float64) == 1).all()
    ctx.barrier()
    if ctx.rank == 0:
        ctx.segments.kept[identity].delete()
    else:
        segment.delete()
        del segment
    gc.collect()
    assert array() is None


@contract(ranks=2)
def test_slices(ctx: Any) -> None:
    segment = ctx.segment(100)
    piece = segment[10:30]
    assert (piece.offset, piece.nbytes, piece.segment_id) == (10, 20, segment.id)
    assert (segment[:].nbytes, segment[40:].nbytes, segment[:5].nbytes) == (100, 60, 5)
    assert segment[90:200].nbytes == 110  # a peer's copy may be larger: checked when used
    with pytest.raises(pgasdl.SegmentError):
        ctx.write(segment[90:200], ctx.rank, segment[90:200])
    for bad in (slice(-1, 5), slice(0, -1), slice(5, 4), slice(0, 10, 2), slice(2**63, 2**64)):
        with pytest.raises(pgasdl.SegmentError):
            segment[bad]
    for bad in (5, None, "a", (1, 2), slice("a", "b"), slice(0.0, 1.0)):
        with pytest.raises(TypeError):
            segment[bad]


@contract(ranks=2)
def test_creation_continues_after_timeout(ctx: Any) -> None:
    """A timeout names who is missing; the same call goes on, another one is refused."""
    go = ctx.segment(0)
    if ctx.rank == 0:
        with pytest.raises(pgasdl.PgasTimeoutError, match="rank 1"):
            ctx.segment(4096, timeout=0.02)
        with pytest.raises(pgasdl.MismatchError):
            ctx.segment(8192, timeout=0.02)
        with pytest.raises(pgasdl.PgasTimeoutError):
            ctx.segment(4096, timeout=0)
        ctx.notify(1, go, 0)
    else:
        ctx.notify_waitsome(go)
    segment = ctx.segment(4096)
    assert segment.nbytes_of(1 - ctx.rank) == 4096
    assert segment.id == int(ctx.world.allgather("id", str(segment.id).encode())[0])


@contract(ranks=3, on=ORDERING)
def test_creation_in_many_short_calls(ctx: Any) -> None:
    """A later call sends completely what an earlier one could not send."""

    def create(nbytes: int) -> Any:
        while True:
            with contextlib.suppress(pgasdl.PgasTimeoutError):
                return ctx.segment(nbytes, timeout=0)

    for turn in range(10):
        segment = create(8 * (turn + ctx.rank))
        sizes = [segment.nbytes_of(peer) for peer in range(ctx.size)]
        assert sizes == [8 * (turn + peer) for peer in range(ctx.size)]


@contract(ranks=2)
def test_segment_meets_bind(ctx: Any) -> None:
    """If ranks create different things, both get an error."""
    with pytest.raises(pgasdl.MismatchError, match="rank"):
        if ctx.rank == 0:
            ctx.segment(64)
        else:
            ctx.bind(bytearray(64))
    assert ctx.segment(64).nbytes == 64
