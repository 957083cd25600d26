"""The prefetcher, and training on what it reads."""

from __future__ import annotations

import gc
import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from input_tools import RECORD, Encoded, records, right, saved
from support.patience import until
from support.ranks import on_ranks

from pgasdl import (
    BufferRefusedError,
    ClosedError,
    Context,
    DataError,
    GradientExchange,
    PgasTimeoutError,
    loopback,
)
from pgasdl.input import Batches, Prefetcher, Records
from pgasdl.input.descriptors import Descriptor


def prefetchers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "pgasdl-prefetcher"]


@pytest.mark.parametrize("depth", [2, 3, 9])
@pytest.mark.parametrize(("size", "batch"), [(1, 10), (3, 10), (2, 4)])
def test_every_batch_in_order(data: Records, size: int, batch: int, depth: int) -> None:
    for rank in range(size):
        iterations = Batches(43, batch, rank=rank, size=size).iterations(2, 30)
        with Prefetcher(data, iterations, depth=depth) as prefetcher:
            for rows, got in zip(iterations, prefetcher, strict=True):
                right(got, rows)
            del got
            with pytest.raises(StopIteration):
                next(prefetcher)
        with pytest.raises(ClosedError):
            next(prefetcher)
    assert not prefetchers()


def test_no_iteration(data: Records) -> None:
    with Prefetcher(data, Batches(43, 10).iterations(3, 3)) as prefetcher:
        assert list(prefetcher) == []


def test_a_batch_that_is_in_use_is_not_overwritten(data: Records) -> None:
    """Whatever refers to it: an array, a view of a view, one field of it."""
    iterations = Batches(43, 10).iterations(0, 40)
    chance = random.Random(1)
    kept: list[tuple[Any, np.ndarray]] = []
    with Prefetcher(data, iterations, depth=5) as prefetcher:
        for rows in iterations:
            batch = next(prefetcher)
            right(batch, rows)
            view = chance.choice(
                [batch["image"], batch["label"], batch["image"][3:5, 1].reshape(-1)[::2]]
            )
            del batch
            kept.append((view, view.copy()))
            for view, copy in kept:
                assert np.array_equal(view, copy)
            if len(kept) > 3:
                kept.pop(chance.randrange(4))
            del view
    for view, copy in kept:  # and not after the end, either
        assert np.array_equal(view, copy)


def test_tensors_keep_a_batch(data: Records, caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")
    iterations = Batches(43, 10).iterations(0, 4)
    with Prefetcher(data, iterations, depth=2, timeout=0.2) as prefetcher:
        filled = prefetcher._shared.ready
        assert until(lambda: filled.qsize() == 2)
        batch = next(prefetcher)
        tensor = torch.from_numpy(batch["image"])[2:4]
        batch = next(prefetcher)
        with pytest.raises(PgasTimeoutError, match="all 2 buffers hold batches that are in use"):
            next(prefetcher)
        assert "all 2 buffers hold batches that are in use" in caplog.text  # before the error
        assert np.array_equal(tensor.numpy(), records(43)["image"][iterations.batches.rows(0)][2:4])
        del tensor
        assert until(lambda: filled.qsize() == 1)
        right(next(prefetcher), iterations.batches.rows(2))  # the call that was late goes on
        del batch


def test_it_reads_ahead_and_not_too_far(data: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    n_read = 0
    read = Records.read

    def counted(self: Any, rows: Any, out: Any) -> None:
        nonlocal n_read
        read(self, rows, out)
        n_read += 1

    monkeypatch.setattr(Records, "read", counted)
    with Prefetcher(data, Batches(43, 10).iterations(0, 30), depth=4) as prefetcher:
        assert until(lambda: n_read == 4)
        batch = next(prefetcher)
        time.sleep(0.05)
        assert n_read == 4
        del batch
        assert until(lambda: n_read == 5)
        time.sleep(0.05)
        assert n_read == 5


def test_what_the_reader_meets_is_raised(tmp_path: Path) -> None:
    paths = saved(tmp_path, records(43), n_files=2)
    with Records(paths) as files:
        paths[1].write_bytes(paths[1].read_bytes()[: -10 * RECORD.itemsize])
        iterations = Batches(43, 10, seed=None).iterations(0, 4)
        with Prefetcher(files, iterations) as prefetcher:
            right(next(prefetcher), range(10))
            right(next(prefetcher), range(10, 20))
            with pytest.raises(DataError, match="cut"):
                for _ in prefetcher:
                    pass
            with pytest.raises(StopIteration):
                next(prefetcher)
    assert not prefetchers()


def test_a_read_that_takes_long(data: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    fill = Descriptor.fill

    n_reads = 0

    def late(*arguments: Any) -> bool:
        nonlocal n_reads
        n_reads += 1
        held.wait(20)
        return fill(*arguments)

    monkeypatch.setattr(Descriptor, "fill", late)
    iterations = Batches(43, 10).iterations(0, 3)
    prefetcher = Prefetcher(data, iterations, timeout=0.05)
    with pytest.raises(PgasTimeoutError, match="the read is not done"):
        next(prefetcher)
    with pytest.raises(PgasTimeoutError, match="still in a read"):
        prefetcher.close()
    held.set()
    assert until(lambda: not prefetchers())
    assert n_reads == 10  # the batch that was begun
    prefetcher.close()


def test_the_thread_ends_with_the_prefetcher(data: Records) -> None:
    iterations = Batches(43, 10).iterations(0, 1000)
    prefetcher = Prefetcher(data, iterations)
    batch = next(prefetcher)
    assert prefetchers()
    del prefetcher
    gc.collect()
    assert until(lambda: not prefetchers())
    right(batch, iterations.batches.rows(0))
    with suppress(ZeroDivisionError), Prefetcher(data, iterations) as prefetcher:
        next(prefetcher)
        1 / 0  # noqa: B018
    assert not prefetchers()


def test_memory_that_is_refused(data: Records) -> None:
    iterations = Batches(43, 10).iterations(0, 3)
    needed = Prefetcher.nbytes(data, iterations, 3)
    readonly = np.zeros(needed, np.uint8)
    readonly.flags.writeable = False
    for memory in (np.zeros(needed - 1, np.uint8), np.zeros(2 * needed, np.uint8)[::2], readonly):
        with pytest.raises(BufferRefusedError):
            Prefetcher(data, iterations, memory=memory)
    with pytest.raises(ValueError, match="depth 1"):
        Prefetcher(data, iterations, depth=1)
    with pytest.raises(ValueError, match="have to be decoded: pass them to a Loader"):
        Prefetcher(Encoded(43), iterations)  # type: ignore[arg-type]
    memory = np.zeros(needed // 8 + 1, np.int64)
    with Prefetcher(data, iterations, memory=memory) as prefetcher:
        assert all(np.shares_memory(batch["image"], memory) for batch in prefetcher)


@on_ranks(2)
def test_batches_lie_in_a_segment_where_peers_read_them(ctx: Context, data: Records) -> None:
    batches = Batches(43, 10, rank=ctx.rank, size=ctx.size)
    iterations = batches.iterations(0, 6)
    nbytes = Prefetcher.nbytes(data, iterations)
    segment, there = ctx.segment(nbytes), ctx.segment(nbytes)
    peer = 1 - ctx.rank
    begin = segment.numpy().ctypes.data
    with Prefetcher(data, iterations, memory=segment) as prefetcher:
        for iteration, batch in enumerate(prefetcher):
            right(batch, batches.rows(iteration))
            start = batch["image"].ctypes.data - begin
            stop = start + batch["image"].nbytes
            assert 0 <= start < stop <= nbytes
            ctx.write_notify(segment[start:stop], peer, there[0 : stop - start], 0)
            assert ctx.notify_waitsome(there) == 0
            ctx.notify_reset(there, 0)
            theirs = Batches(43, 10, rank=peer, size=ctx.size).rows(iteration)
            found = there.numpy(np.uint8, 0, (5, 3, 5, 5))
            assert np.array_equal(found, records(43)["image"][theirs])
            ctx.wait()
            ctx.barrier()
        segment.delete()
        right(batch, batches.rows(5))  # views keep the memory


def trained(
    ctx: Context, paths: list[Path], first: int, last: int, weights: np.ndarray
) -> np.ndarray:
    """Linear regression on data in files: the global batch's mean gradient, from ``weights``."""
    batch, weights = 7, weights.copy()
    exchange = GradientExchange(ctx, [((5,), np.float64)])
    with Records(paths) as files:
        batches = Batches(len(files), batch, rank=ctx.rank, size=ctx.size, seed=2)
        with Prefetcher(files, batches.iterations(first, last)) as prefetcher:
            for part in prefetcher:
                error = part["x"] @ weights - part["y"]
                # Ranks' parts differ in size: their mean has to be the global batch's.
                exchange.gradient(0)[...] = error @ part["x"] * (ctx.size / batch)
                exchange.ready(0)
                exchange.wait(0)
                weights -= 0.1 * exchange.gradient(0)
    return weights


@pytest.fixture
def regression(tmp_path: Path) -> list[Path]:
    chance = np.random.default_rng(1)
    x = chance.standard_normal((40, 5))
    array = np.empty(40, [("x", "<f8", (5,)), ("y", "<f8")])
    array["x"], array["y"] = x, x @ [1, -2, 3, -4, 5]
    return saved(tmp_path, array)


def test_training_of_one_process(regression: list[Path]) -> None:
    start = np.zeros(5)
    [alone] = loopback.run(1, lambda ctx: trained(ctx, regression, 0, 60, start))
    assert np.allclose(alone, [1, -2, 3, -4, 5], atol=0.5)
    for size in (2, 3):
        ranks = loopback.run(size, lambda ctx: trained(ctx, regression, 0, 60, start))
        assert len({weights.tobytes() for weights in ranks}) == 1
        np.testing.assert_allclose(ranks[0], alone, rtol=1e-12)
    # Stopped in the middle of an epoch, and resumed with other ranks.
    half = loopback.run(2, lambda ctx: trained(ctx, regression, 0, 23, start))[0]
    resumed = loopback.run(3, lambda ctx: trained(ctx, regression, 23, 60, half))[0]
    np.testing.assert_allclose(resumed, alone, rtol=1e-12)
