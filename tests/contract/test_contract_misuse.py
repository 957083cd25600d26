"""Bad input: the precise error, nothing posted, neighbouring memory unchanged, never a crash."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from contract_harness import contract

import pgasdl

SIZE = 4096
# Edges of 32 and 64 bits, and offsets that overflow when a length is added.
FAR = (SIZE + 1, 2**31, 2**32, 2**32 + 8, 2**46, 2**62, 2**63 - 9)
BEYOND = (-1, -8, -(2**63), 2**63, 2**63 + 1, 2**64 - 1, 2**64, 2**100)


class Scene:
    """A segment between two that must not change, and every posting form over a pair of slices."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        self.peer = (ctx.rank + 1) % ctx.size
        self.before = ctx.segment(SIZE, notifications=64)
        self.segment = ctx.segment(SIZE, notifications=64)
        self.after = ctx.segment(SIZE, notifications=64)
        for number, segment in enumerate((self.before, self.segment, self.after)):
            segment.numpy()[:] = 10 + number

    def forms(self) -> dict[str, Callable[[Any, Any], None]]:
        ctx, peer, segment = self.ctx, self.peer, self.segment
        return {
            "write": lambda mine, theirs: ctx.write(mine, peer, theirs),
            "read": lambda mine, theirs: ctx.read(mine, peer, theirs),
            "write_notify": lambda mine, theirs: ctx.write_notify(mine, peer, theirs, 0),
            "read_notify": lambda mine, theirs: ctx.read_notify(mine, peer, theirs, 0),
            "write_list": lambda mine, theirs: ctx.write_list([(mine, theirs)] * 2, peer),
            "read_list": lambda mine, theirs: ctx.read_list([(mine, theirs)] * 2, peer),
            "write_list_notify": lambda mine, theirs: ctx.write_list_notify(
                [(mine, theirs)], peer, segment, 0
            ),
            "read_list_notify": lambda mine, theirs: ctx.read_list_notify(
                [(mine, theirs)], peer, segment, 0
            ),
        }

    def unchanged(self) -> None:
        self.ctx.barrier()
        assert self.ctx.queue_size() == 0
        for number, segment in enumerate((self.before, self.segment, self.after)):
            assert (segment.numpy() == 10 + number).all()
            with pytest.raises(pgasdl.PgasTimeoutError):
                self.ctx.notify_waitsome(segment, timeout=0)
        self.ctx.barrier()


@contract(ranks=2)
def test_offsets_and_lengths(ctx: Any) -> None:
    scene = Scene(ctx)
    segment = scene.segment
    good = segment[0:8]
    bad = [segment[at : at + 8] for at in (SIZE - 7, SIZE, *FAR)]
    for form in scene.forms().values():
        for piece in bad:
            with pytest.raises(pgasdl.SegmentError):
                form(good, piece)
            with pytest.raises(pgasdl.SegmentError):
                form(piece, good)
            with pytest.raises(pgasdl.SegmentError):
                form(piece, piece)
        for n in (SIZE + 1, 2**32, 2**63 - 1):
            with pytest.raises(pgasdl.SegmentError):
                form(segment[0:n], segment[0:n])
            with pytest.raises(pgasdl.SegmentError):
                form(segment[n:n], segment[n:n])
    for bound in BEYOND:
        for wrong in (slice(bound, None), slice(0, bound), slice(bound, bound)):
            with pytest.raises(pgasdl.SegmentError):
                segment[wrong]
    scene.unchanged()
    # A slice that ends exactly at the end is no error.
    for form in scene.forms().values():
        form(segment[SIZE - 8 : SIZE], segment[SIZE - 16 : SIZE - 8])
        form(segment[0:SIZE], segment[0:SIZE])
        form(segment[SIZE:SIZE], segment[0:0])
    ctx.wait()


@contract(ranks=2)
def test_ranks(ctx: Any) -> None:
    scene = Scene(ctx)
    piece, other = scene.segment[0:8], scene.segment[8:16]
    for wrong in (ctx.size, ctx.size + 1, 2**31 - 1, 2**31, 2**32, *BEYOND):
        for use in (
            lambda peer: ctx.write(piece, peer, other),
            lambda peer: ctx.read(piece, peer, other),
            lambda peer: ctx.notify(peer, scene.segment, 0),
            lambda peer: ctx.write_notify(piece, peer, other, 0),
            lambda peer: ctx.read_notify(piece, peer, other, 0),
            lambda peer: ctx.write_list([], peer),
            lambda peer: ctx.read_list([(piece, other)], peer),
            lambda peer: ctx.write_list_notify([], peer, scene.segment, 0),
            lambda peer: ctx.read_list_notify([], peer, scene.segment, 0),
            lambda peer: ctx.atomic_fetch_add(piece, peer, 1),
            lambda peer: ctx.atomic_compare_swap(piece, peer, 0, 1),
            lambda peer: ctx.passive_send(b"", peer),
            ctx.ping,
            ctx.kill,
            ctx.transport_of,
            scene.segment.nbytes_of,
            lambda peer: ctx.group([ctx.rank, peer]),
        ):
            with pytest.raises(pgasdl.RankError):
                use(wrong)
    with pytest.raises(pgasdl.RankError, match="this one"):
        ctx.kill(ctx.rank)
    scene.unchanged()


@contract(ranks=2)
def test_segments_of_others(ctx: Any) -> None:
    """Segments without a copy on the peer, deleted ones, and objects that are no slices."""
    scene = Scene(ctx)
    alone = ctx.segment(SIZE, group=ctx.group([ctx.rank]))
    gone = ctx.segment(SIZE)
    gone_piece = gone[0:8]
    gone.delete()
    good = scene.segment[0:8]
    for form in scene.forms().values():
        with pytest.raises(pgasdl.RankError, match="no copy"):
            form(good, alone[0:8])
        with pytest.raises(pgasdl.SegmentError, match="deleted"):
            form(gone_piece, good)
        for wrong in (None, 5, "seg", scene.segment, (0, 8), b"", np.zeros(8)):
            with pytest.raises((TypeError, pgasdl.BufferRefusedError)):
                form(wrong, good)
            with pytest.raises((TypeError, pgasdl.BufferRefusedError)):
                form(good, wrong)
    for wrong, told in ((np.zeros(8), r"ctx\.bind"), (scene.segment, r"segment\[0:n\]")):
        for call in (ctx.write, ctx.read, functools.partial(ctx.write_notify, notification=0)):
            with pytest.raises(TypeError, match=f"not '.*{type(wrong).__name__}'.*{told}"):
                call(wrong, scene.peer, good)
    with pytest.raises(pgasdl.RankError, match="no copy"):
        ctx.notify(scene.peer, alone, 0)
    scene.unchanged()


@contract(ranks=2)
def test_wrong_types(ctx: Any) -> None:
    """A wrong type of any argument raises TypeError."""
    scene = Scene(ctx)
    segment = scene.segment
    a, b = segment[0:8], segment[8:16]
    for wrong in (None, "0", 1.0, 0.5, float("nan"), [], {}, object(), b"0", 1j):
        calls: list[Callable[[], Any]] = [
            lambda wrong=wrong: ctx.write(a, wrong, b),
            lambda wrong=wrong: ctx.write(a, 0, b, queue=wrong),
            lambda wrong=wrong: ctx.read(a, wrong, b),
            lambda wrong=wrong: ctx.notify(wrong, segment, 0),
            lambda wrong=wrong: ctx.notify(0, wrong, 0),
            lambda wrong=wrong: ctx.notify(0, segment, wrong),
            lambda wrong=wrong: ctx.notify(0, segment, 0, wrong),
            lambda wrong=wrong: ctx.write_notify(a, 0, b, wrong),
            lambda wrong=wrong: ctx.read_notify(a, 0, b, 0, wrong),
            lambda wrong=wrong: ctx.notify_waitsome(wrong, timeout=0),
            lambda wrong=wrong: ctx.notify_waitsome(segment, wrong or "", timeout=0),
            lambda wrong=wrong: ctx.notify_reset(segment, wrong),
            lambda wrong=wrong: ctx.notify_reset(wrong, 0),
            lambda wrong=wrong: ctx.wait(wrong),
            lambda wrong=wrong: ctx.queue_size(wrong),
            lambda wrong=wrong: ctx.queue_delete(wrong),
            lambda wrong=wrong: ctx.segment(wrong),
            lambda wrong=wrong: ctx.atomic_fetch_add(a, wrong, 1),
            lambda wrong=wrong: ctx.passive_send(b"", wrong),
            lambda wrong=wrong: ctx.ping(wrong),
            lambda wrong=wrong: segment.nbytes_of(wrong),
            lambda wrong=wrong: ctx.transport_of(wrong),
            lambda wrong=wrong: ctx.kill(None if isinstance(wrong, float) else wrong),
            lambda wrong=wrong: segment[wrong],
        ]
        for call in calls:
            try:
                call()
            except TypeError:
                continue
            source = inspect.getsource(call)
            raise AssertionError(f"no TypeError for {wrong!r} in {source}")
        if wrong is not None and not isinstance(wrong, float):
            with pytest.raises(TypeError):
                ctx.notify_waitsome(segment, timeout=wrong)
            with pytest.raises(TypeError):
                ctx.barrier(timeout=wrong)
    for missing in (ctx.write, ctx.read, ctx.notify, ctx.notify_waitsome, ctx.atomic_fetch_add):
        with pytest.raises(TypeError):
            missing()
        with pytest.raises(TypeError):
            missing(1, 2, 3, 4, 5, 6, 7, 8, 9)
        with pytest.raises(TypeError):
            missing(nonsense=1)
    scene.unchanged()


@contract(ranks=2)
def test_timeouts(ctx: Any) -> None:
    scene = Scene(ctx)
    for wrong in (-1, -0.001, float("nan"), float("-inf")):
        for call in (
            lambda wrong: ctx.barrier(timeout=wrong),
            lambda wrong: ctx.wait(timeout=wrong),
            lambda wrong: ctx.notify_waitsome(scene.segment, timeout=wrong),
            lambda wrong: ctx.write(scene.segment[0:1], 0, scene.segment[1:2], timeout=wrong),
            lambda wrong: ctx.passive_receive(timeout=wrong),
            lambda wrong: ctx.passive_send(b"", 0, timeout=wrong),
            lambda wrong: ctx.segment(8, timeout=wrong),
            lambda wrong: ctx.atomic_fetch_add(scene.segment[0:8], 0, 1, timeout=wrong),
        ):
            with pytest.raises(ValueError):
                call(wrong)
    scene.unchanged()
    ctx.notify(ctx.rank, scene.segment, 0)
    for long in (1e9, 1e300, float("inf")):
        assert ctx.notify_waitsome(scene.segment, timeout=long) == 0
        ctx.barrier(timeout=long)


@contract(ranks=2)
def test_index_objects_are_integers(ctx: Any) -> None:
    """NumPy integers and other __index__ objects are taken as integers."""
    segment = ctx.segment(np.int64(64), notifications=np.uint16(8))
    ctx.write_notify(
        segment[np.int32(0) : np.uint8(8)], np.int64(1 - ctx.rank), segment[8:16], np.int8(3),
        np.uint32(2**32 - 1), queue=np.int16(0),
    )  # fmt: skip
    assert ctx.notify_waitsome(segment, np.int64(3), np.int64(1)) == 3
    assert ctx.notify_reset(segment, np.uint64(3)) == 2**32 - 1
    assert ctx.atomic_fetch_add(segment[16:24], np.int8(0), np.int64(1)) >= 0


@contract(ranks=2)
def test_objects_that_were_never_finished(ctx: Any) -> None:
    """An object whose __init__ failed or was skipped raises errors, and does not crash."""
    for kind in (pgasdl.Segment, pgasdl.Context):
        empty = kind.__new__(kind)
        for name in ("id", "nbytes", "rank", "closed", "address", "deleted"):
            with pytest.raises((TypeError, AttributeError)):
                getattr(empty, name)
        with pytest.raises(TypeError):
            ctx.notify_waitsome(empty, timeout=0)
        with pytest.raises((TypeError, BufferError)):
            memoryview(empty)
