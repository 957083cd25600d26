"""Collectives on memory of a GPU have the bits of those on the host; streams order them.

``collectives.py N [PART...]`` : ranks are N threads, of which ``unmapped N`` map nothing of each
other's memory; 0: processes that a launcher started, ``abreast 0`` each on a GPU of its own,
``apart 0`` where each sees only that.

Streams of the fake driver are late: a step that does not wait for its stream works on old bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from cuda_arrays import Array, Device, Stream, capturing, cupy, cut

import pgasdl
from pgasdl import GradientExchange, loopback
from pgasdl.plans import PLANS

DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.int64)
N_TURNS = 3
GPU = int(os.environ["PGASDL_RANK"]) if "abreast" in sys.argv[1] else 0


def numbers(ctx: Any, count: int, dtype: npt.DTypeLike, turn: int) -> npt.NDArray[Any]:
    """The values that this rank contributes."""
    values = np.random.default_rng([ctx.rank, count, turn]).standard_normal(count) * 100
    return np.asarray(values.astype(dtype))


def same(found: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> bool:
    return found.tobytes() == wanted.tobytes()


def allreduces(ctx: Any) -> None:
    """Arrays in a segment and elsewhere, of all dtypes."""
    stream = Stream()
    segment = ctx.segment(1 << 16, device=f"cuda:{GPU}")
    for dtype in DTYPES:
        size = np.dtype(dtype).itemsize
        for count in (1, 1000):
            inside = Array(count, dtype, segment.address + 64 * size)
            for array in (inside, Array(count, dtype)):
                for turn in range(N_TURNS):
                    op = "sum" if np.dtype(dtype).kind == "i" or turn == 0 else "mean"
                    mine = numbers(ctx, count, dtype, turn)
                    wanted = ctx.allreduce(mine.copy(), op)
                    array.fill(mine, stream)
                    ctx.allreduce(array, op, stream=stream)
                    assert same(array.values(stream), wanted), (dtype, count, turn)
    ctx.barrier()


def long_arrays(ctx: Any) -> None:
    """Longer than the workspace's pieces, one after the other on one stream, never waiting."""
    stream, count = Stream(), 5_000_000
    array = Array(count, np.float32)
    kept = [numbers(ctx, count, np.float32, turn) for turn in range(2)]
    wanted = [ctx.allreduce(each.copy()) for each in kept]
    for mine, result in zip(kept, wanted, strict=True):
        array.fill(mine, stream)
        ctx.allreduce(array, stream=stream)
        assert same(array.values(stream), result)
    ctx.barrier()


def handles(ctx: Any) -> None:
    """Every plan and kind, run on a stream, or started after it and awaited."""
    stream, count = Stream(), 3000
    for name, spec in PLANS.items():
        for kind in spec.kinds:
            if kind == "update":
                continue
            segment = ctx.segment(4 * count, device=f"cuda:{GPU}")
            array = Array(count, np.float32, segment.address)
            on_host = ctx.segment(4 * count)
            there = on_host.numpy(np.float32)
            if not offered(ctx, kind, there, name):
                assert not offered(ctx, kind, array, name), (kind, name)
                continue
            handle = ctx.collective_handle(kind, array, plan=name)
            host = ctx.collective_handle(kind, there, plan=name)
            for turn in range(N_TURNS):
                mine = numbers(ctx, count, np.float32, turn)
                there[:] = mine
                host()
                array.fill(mine, stream)
                if turn % 2:
                    handle.start(stream=stream)
                    handle.wait()
                else:
                    handle.run(stream=stream)
                found = array.values(stream)
                if kind != "reduce" or ctx.rank == 0:
                    assert compared(ctx, kind, found, there), (name, kind, turn)
            handle.close()
            host.close()
    ctx.barrier()


def offered(ctx: Any, kind: str, array: Any, plan: str) -> bool:
    """Not every plan goes without memory that peers map; so says every rank."""
    try:
        ctx.collective_handle(kind, array, plan=plan).close()
    except pgasdl.PlanError:
        return False
    return True


def compared(ctx: Any, kind: str, found: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> bool:
    """Only what the kind defines."""
    if kind == "reduce-scatter":
        begin, n = pgasdl.plans.blocks(len(wanted), ctx.size)[ctx.rank]
        return same(found[begin : begin + n], wanted[begin : begin + n])
    return same(found, wanted)


def bound(ctx: Any) -> None:
    """The GPUs load and store memory that others allocated, the older way, too."""
    stream, count = Stream(), 3000
    array = Array(count, np.float32)
    segment = ctx.bind(array)
    handle = ctx.allreduce_handle(array)
    for turn in range(N_TURNS):
        mine = numbers(ctx, count, np.float32, turn)
        wanted = ctx.allreduce(mine.copy(), plan="gdraa")
        array.fill(mine, stream)
        handle.run(stream=stream)
        assert same(array.values(stream), wanted), turn
    handle.close()
    ctx.barrier()
    segment.delete()


def pool(ctx: Any) -> None:
    """Arrays of the pool lie elsewhere on each rank, and are used again when they are gone."""
    stream = Stream()
    with contextlib.suppress(pgasdl.PoolFullError):
        cut(ctx, 1, np.float32)
        raise AssertionError("an array was cut from no pool")
    for _ in range(2):
        ctx.pool(1 << 17, device="cuda:0")
    ctx.pool(1 << 17)
    begin = None
    for count in (10, 3000, 20_000):
        padding = cut(ctx, 100 * ctx.rank + 1, np.float32)
        array = cut(ctx, count, np.float32, like=Array(count, np.float32))
        if ctx.rank == 0:
            assert begin in (None, padding.address)  # the block of an earlier turn
            begin = padding.address
        on_host = ctx.empty(count)
        handle, host = ctx.allreduce_handle(array), ctx.allreduce_handle(on_host)
        for turn in range(N_TURNS):
            mine = numbers(ctx, count, np.float32, turn)
            wanted = ctx.allreduce(mine.copy())
            array.fill(mine, stream)
            ctx.allreduce(array, stream=stream)
            assert same(array.values(stream), wanted), (count, turn)
            on_host[:] = mine
            host()
            array.fill(mine, stream)
            handle.run(stream=stream)
            assert same(array.values(stream), on_host), (count, turn)
        handle.close()
        host.close()
        del handle, host, array, padding, on_host
    with contextlib.suppress(pgasdl.PoolFullError):
        cut(ctx, 1 << 17, np.uint8).keep = cut(ctx, 1 << 17, np.uint8), cut(ctx, 1, np.uint8)
        raise AssertionError("more was cut than there is")
    assert "on cuda:0 in 2 segments" in ctx.describe()
    ctx.barrier()


def exchanges(ctx: Any) -> None:
    """A model's layers, ready on one stream and used on another, in several iterations."""
    backward, forward = Stream(), Stream()
    shapes = [(300,), (7, 11), (5000,), (1,)]
    layers = [(shape, "f4") for shape in shapes]
    for plan in (None, *PLANS):
        if not exchanged(ctx, layers, plan, "cpu"):
            assert not exchanged(ctx, layers, plan, f"cuda:{GPU}"), plan
            continue
        for bucket_bytes in (0, 1 << 12):
            with (
                GradientExchange(
                    ctx, layers, plan=plan, bucket_bytes=bucket_bytes, device=f"cuda:{GPU}"
                ) as exchange,
                GradientExchange(ctx, layers, plan=plan, bucket_bytes=bucket_bytes) as host,
            ):
                arrays = [
                    Array(
                        int(np.prod(layer.shape)), np.float32, exchange.gradients.address + layer.at
                    )
                    for layer in exchange.layers
                ]
                kept = []
                for turn in range(N_TURNS):
                    order = np.random.default_rng([ctx.rank, turn]).permutation(len(shapes))
                    for number in order:
                        mine = numbers(ctx, arrays[number].count, np.float32, turn)
                        host.gradient(int(number)).flat[:] = mine
                        host.ready(int(number))
                        kept.append(mine)
                        arrays[number].fill(mine, backward)
                        exchange.ready(int(number), stream=backward)
                    for number, array in enumerate(arrays):
                        host.wait(number)
                        exchange.wait(number)
                        wanted = host.gradient(number).ravel()
                        assert same(array.values(forward), wanted), (plan, turn, number)
                exchange.finish()
    ctx.barrier()


def exchanged(ctx: Any, layers: list[Any], plan: str | None, device: str) -> bool:
    """Not every plan averages, or goes without memory that peers map; so says every rank."""
    try:
        GradientExchange(ctx, layers, plan=plan, device=device).close()
    except pgasdl.PlanError:
        return False
    return True


def updates(ctx: Any) -> None:
    """Owners' updates are late, on streams that nobody told of but as the current ones."""
    current, forward = Stream(), Stream()
    shapes = [(300,), (7, 11), (5000,), (1,)]
    layers = [(shape, "f4") for shape in shapes]
    with cupy(current):
        for plan, spec in PLANS.items():
            if "update" not in spec.kinds or (spec.mapped and not ctx.world.mapped):
                continue
            for bucket_bytes in (0, 1 << 12):
                updated(ctx, layers, plan, bucket_bytes, current, forward)
    ctx.barrier()


def updated(
    ctx: Any, layers: list[Any], plan: str, bucket_bytes: int, current: Stream, forward: Stream
) -> None:
    """Weights become what the mean gradient was in the iteration before, by way of a scratch."""
    scratch: dict[tuple[int, int], Array] = {}
    on_host: dict[tuple[int, int], npt.NDArray[Any]] = {}

    def late(block: Any) -> None:
        kept = scratch[block.bucket, block.offset]
        assert block.gradient.count == block.weights.count == block.count
        current.copy(block.weights.address, kept.address, kept.nbytes)
        current.copy(kept.address, block.gradient.address, kept.nbytes)

    def at_once(block: Any) -> None:
        kept = on_host[block.bucket, block.offset]
        block.weights[:] = kept
        kept[:] = block.gradient

    same_of_both: dict[str, Any] = {"kind": "update", "plan": plan, "bucket_bytes": bucket_bytes}
    with (
        GradientExchange(
            ctx, layers, update=late, device=f"cuda:{GPU}", **same_of_both
        ) as exchange,
        GradientExchange(ctx, layers, update=at_once, **same_of_both) as host,
    ):
        gradients = [exchange.gradient(number) for number in range(len(layers))]
        for block in exchange.blocks:
            scratch[block.bucket, block.offset] = Array(block.count, np.float32)
            scratch[block.bucket, block.offset].fill(np.zeros(block.count, np.float32), current)
        for block in host.blocks:  # a bucket staged in pieces has other blocks
            on_host[block.bucket, block.offset] = np.zeros(block.count, np.float32)
        kept = []
        for turn in range(N_TURNS):
            for number in np.random.default_rng([ctx.rank, turn]).permutation(len(layers)):
                mine = numbers(ctx, gradients[number].count, np.float32, turn)
                host.gradient(int(number)).flat[:] = mine
                host.ready(int(number))
                kept.append(mine)
                gradients[number].fill(mine, current)
                exchange.ready(int(number))
            for number in range(len(layers)):
                host.wait(number)
                exchange.wait(number)
                found = exchange.weight(number).values(forward)
                assert same(found, host.weight(number).ravel()), (plan, turn, number)
        assert turn == 0 or found.any()


def captured_updates(ctx: Any) -> None:
    """In a capture layers are not ready, and nobody updates; all of it can be called afterwards."""
    current = Stream()
    made: list[int] = []

    def update(block: Any) -> None:
        made.append(block.offset)
        current.copy(block.weights.address, block.gradient.address, block.weights.nbytes)

    def refused(call: Callable[[], None]) -> None:
        with capturing(current):
            try:
                call()
                said = "no refusal"
            except pgasdl.PgasError as error:
                said = f"{type(error).__name__}: {error}"
        assert said.startswith("UnavailableError: ") and "outside of the capture" in said, said

    layers = [((300,), "f4"), ((7,), "f4")]
    for bucket_bytes in (0, 1 << 12):
        options: dict[str, Any] = {"plan": "gdraa", "bucket_bytes": bucket_bytes}
        with (
            cupy(current),
            GradientExchange(
                ctx, layers, kind="update", update=update, device=f"cuda:{GPU}", **options
            ) as exchange,
        ):
            for layer, (shape, _) in enumerate(layers):
                values = np.full(shape, ctx.rank + 1, np.float32)
                exchange.gradient(layer).fill(values, current)
                refused(lambda layer=layer: exchange.ready(layer))
            for layer in range(len(layers)):
                exchange.ready(layer)
            made.clear()
            refused(lambda: exchange.wait(0))
            assert not made
            for layer in range(len(layers)):
                exchange.wait(layer)
                weights = exchange.weight(layer).values(current)
                assert (weights == (ctx.size + 1) / 2).all(), weights
            assert made
    ctx.barrier()


def staged(ctx: Any) -> None:
    """Where peers reach host memory only, it is copied there and back."""
    stream = Stream()
    array = Array(1000, np.float32)
    on_host = np.empty(1000, np.float32)
    handles = [ctx.allreduce_handle(each) for each in (array, on_host)]
    by_gpus = ctx.mapped and ctx.size > 1 and ctx.world.topology.shared_windows is None
    assert (handles[0].plan == "staged") == by_gpus, handles[0].plan
    for turn in range(N_TURNS):
        mine = numbers(ctx, 1000, np.float32, turn)
        wanted = ctx.allreduce(mine.copy(), plan="gdraa")
        array.fill(mine, stream)
        ctx.allreduce(array, stream=stream)
        assert same(array.values(stream), wanted), turn
        on_host[:] = mine
        array.fill(mine, stream)
        handles[0].run(stream=stream)
        handles[1].run()
        assert same(array.values(stream), on_host), turn
    pinned = ctx.segment(4000)
    is_pinned = pinned.pin()
    assert pinned.pin() == is_pinned and is_pinned >= ctx.takes_devices
    pinned.numpy(np.float32)[:] = numbers(ctx, 1000, np.float32, N_TURNS)
    assert array.address is not None
    stream.copy(array.address, pinned.address, pinned.nbytes)  # late, if it is not pageable
    stream.synchronize()
    assert same(array.values(stream), pinned.numpy(np.float32))
    assert ("by way of the host" in ctx.describe()) != ctx.takes_devices
    ctx.barrier()


PARTS = {
    part.__name__: part
    for part in (
        allreduces,
        long_arrays,
        handles,
        bound,
        pool,
        exchanges,
        updates,
        captured_updates,
        staged,
    )
}


def run(ctx: Any, parts: list[str]) -> list[str]:
    with Device(GPU):
        for part in parts:
            PARTS[part](ctx)
    return parts


def main() -> None:
    how, parts = sys.argv[1].split(), sys.argv[2:] or list(PARTS)
    size = int(how[-1])
    if "apart" in how:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["PGASDL_RANK"]
    if size:
        done = loopback.run(size, lambda ctx: run(ctx, parts), mapped="unmapped" not in how)
        print(json.dumps(done[0]))
        return
    with pgasdl.init(log="warning", timeout=30) as ctx:
        done = run(ctx, parts)
        if ctx.rank == 0:
            print(json.dumps(done))


if __name__ == "__main__":
    main()
