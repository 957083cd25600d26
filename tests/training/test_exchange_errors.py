"""Errors are raised at once, on every rank concerned, and name what they are about."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from exchange_tools import Case, contribution, expected, same_bits, train
from support.ranks import on_ranks

import pgasdl
from pgasdl import (
    Block,
    BufferRefusedError,
    ClosedError,
    ConfigError,
    Context,
    GradientExchange,
    MismatchError,
    PeerLostError,
    PgasTimeoutError,
    PlanError,
    loopback,
)

KINDS = "average, sum, update, reduce, broadcast$"
LAYERS: list[Any] = [((4, 3), "float32"), ((5,), "float32"), ((6,), "float64")]


def nothing(block: Block) -> None:
    """An update that leaves the weights unchanged."""


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"layers": [LAYERS[0], ((6,), "float32"), LAYERS[2]]}, ["layer 1", "[5]", "[6]"]),
        ({"layers": [LAYERS[0], LAYERS[1], ((6,), "float32")]}, ["layer 2", "float64", "float32"]),
        ({"layers": [((3, 4), "float32"), *LAYERS[1:]]}, ["layer 0", "[4, 3]", "[3, 4]"]),
        ({"layers": LAYERS[:2]}, ["2 layers", "3 layers"]),
        ({"layers": []}, ["0 layers", "3 layers"]),
        ({"kind": "sum"}, ["kind sum", "kind average"]),
        ({"plan": "tree"}, ["plan tree", "plan gdraa"]),
        ({"bucket_bytes": 64}, ["buckets of 64 bytes", "buckets of 0 bytes"]),
        ({"wire": "bfloat16"}, ["wire bfloat16", "wire None"]),
        ({"plan": "tree", "root": 1}, ["root"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_disagree(theirs: dict[str, Any], words: list[str], odd: int) -> None:
    def program(ctx: Context) -> str:
        given: dict[str, Any] = {"layers": LAYERS, "kind": "average", "plan": "gdraa"}
        given |= theirs if ctx.rank == odd else {}
        began = time.monotonic()
        with pytest.raises(MismatchError) as caught:
            GradientExchange(ctx, given.pop("layers"), **given)
        assert time.monotonic() - began < 5
        ctx.barrier()  # all are still in step
        train(ctx, case, wanted)
        return str(caught.value)

    case = Case("gdraa", "average")
    wanted = expected(case, 3, 1)
    for message in loopback.run(3, program):
        assert "rank 0" in message
        assert f"rank {odd or 1}" in message
        for word in words:
            assert word in message


def test_the_layer_that_differs_among_many() -> None:
    def program(ctx: Context) -> str:
        layers = [((n + 1,), "float32") for n in range(700)]
        if ctx.rank == 1:
            layers[423] = ((7,), "float32")
        with pytest.raises(MismatchError) as caught:
            GradientExchange(ctx, layers)
        ctx.barrier()
        return str(caught.value)

    for message in loopback.run(2, program):
        assert "layer 423 is float32 [424] on rank 0, but float32 [7] on rank 1" in message


@pytest.mark.parametrize(
    ("layers", "given", "error", "words"),
    [
        ([((2,), "complex64")], {}, BufferRefusedError, "complex64"),
        ([((2,), "int32")], {}, BufferRefusedError, "layer 0 is int32"),
        (
            [((2,), "int64")],
            {"kind": "sum", "wire": "bfloat16"},
            BufferRefusedError,
            "layer 0 is int64",
        ),
        ([((2,), "float32"), 7], {}, BufferRefusedError, "layer 1 is 7"),
        ([((2, -1), "float32")], {}, BufferRefusedError, "shape"),
        (LAYERS, {"plan": "ring-of-fire"}, PlanError, "ring-of-fire"),
        (LAYERS, {"kind": "median"}, ConfigError, f"'median'; there are {KINDS}"),
        (LAYERS, {"kind": "all-gather", "plan": "gdraa"}, ConfigError, f"'all-gather'.*{KINDS}"),
        (LAYERS, {"kind": "all-to-all"}, ConfigError, f"'all-to-all'.*{KINDS}"),
        (LAYERS, {"kind": "update"}, PlanError, "update"),
        (LAYERS, {"update": nothing}, PlanError, "update"),
        (LAYERS, {"kind": "update", "update": nothing, "plan": "staged"}, PlanError, "update"),
        (LAYERS, {"plan": "gdraa-direct", "wire": "bfloat16"}, PlanError, "wire"),
        (LAYERS, {"plan": "gdraa", "root": 1}, PlanError, "root"),
        (LAYERS, {"plan": "tree", "root": 2}, PlanError, "root"),
        (LAYERS, {"plan": "gdraa", "rotate_root": True}, PlanError, "rotate_root: plan gdraa has"),
        (LAYERS, {"wire": "complex64"}, BufferRefusedError, "complex64"),
    ],
)
@on_ranks(2)
def test_what_cannot_be(
    ctx: Context, layers: list[Any], given: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        GradientExchange(ctx, layers, **given)
    assert not ctx.state.servers
    ctx.barrier()


@on_ranks(2, mapped=False)
def test_direct_needs_mapped_memory(ctx: Context) -> None:
    assert GradientExchange(ctx, LAYERS).plan == "gdraa"
    for plan in ("gdraa-direct", "staged"):
        with pytest.raises(PlanError, match="not mapped here"):
            GradientExchange(ctx, LAYERS, plan=plan)


@on_ranks(2)
def test_ready_twice_and_wait_too_early(ctx: Context) -> None:
    alone = GradientExchange(ctx, LAYERS)
    for layer in range(3):
        alone.wait(layer)  # before the first iteration's forward pass: nothing is under way
    alone.ready(1)
    with pytest.raises(PlanError, match=r"layer 1 is ready twice.*wait\(1\)"):
        alone.ready(1)
    alone.wait(1)
    with pytest.raises(PlanError, match="without ready"):
        alone.wait(1)
    alone.ready(1)
    alone.finish()
    alone.wait(1)  # its result is there, and was not waited for
    for call in (alone.ready, alone.wait, alone.gradient):
        for number in (3, -1):
            with pytest.raises(PlanError, match=f"no layer {number}: there are 3"):
                call(number)
    with pytest.raises(PlanError, match="keep weights"):
        alone.weight(0)

    together = GradientExchange(ctx, LAYERS, bucket_bytes=1 << 20)
    together.ready(0)
    with pytest.raises(PlanError, match="layer 0 is ready twice"):
        together.ready(0)
    with pytest.raises(PlanError, match=r"bucket 0 with layers \[1\], which are not ready"):
        together.wait(0)
    with pytest.raises(PlanError, match=r"wait\(1\) without ready\(1\)"):
        together.wait(1)
    together.finish()  # leaves the incomplete bucket as it is
    together.ready(1)
    together.wait(0)
    together.wait(1)


def test_a_timeout_names_who_owes_and_can_be_resumed() -> None:
    late = threading.Event()
    case = Case("gdraa-direct", "average")
    wanted = expected(case, 2, 2)

    def program(ctx: Context) -> None:
        exchange = case.make(ctx)
        exchange.gradient(5)[...] = contribution(case, ctx.rank, 0, 5)
        if ctx.rank == 1:
            assert late.wait(5)
        exchange.ready(5)
        if ctx.rank == 0:
            began = time.monotonic()
            for timeout in (0, 0.05):
                with pytest.raises(PgasTimeoutError, match=r"gdraa-direct.*notification"):
                    exchange.wait(5, timeout=timeout)
            with pytest.raises(PgasTimeoutError, match="owed by rank 1"):
                exchange.finish(timeout=0.05)
            assert 0.1 <= time.monotonic() - began < 5
            assert exchange.timings[5].waiting >= 0.05
            late.set()
        exchange.wait(5)
        assert same_bits(exchange.gradient(5), wanted[0][5])
        train(ctx, case, wanted, exchange=exchange)

    loopback.run(2, program)


def test_a_layer_that_a_peer_did_not_make_ready_is_named() -> None:
    def program(ctx: Context) -> None:
        exchange = GradientExchange(ctx, LAYERS)
        exchange.ready(0)
        if ctx.rank == 0:
            exchange.ready(1)
            told = (
                r"^layer 1: nothing yet from rank 1: the exchange of layer 1, .*called ready\(1\)"
            )
            with pytest.raises(PgasTimeoutError, match=told):
                exchange.wait(1, timeout=0.05)
        ctx.barrier()
        if ctx.rank == 1:
            exchange.ready(1)
        exchange.finish()

    loopback.run(2, program)


def test_a_lost_rank_ends_the_wait() -> None:
    def program(ctx: Context) -> None:
        exchange = GradientExchange(ctx, LAYERS)
        if ctx.rank == 1:
            raise KeyError("rank 1 has a bug")
        exchange.ready(0)
        began = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 1"):
            exchange.wait(0)
        assert time.monotonic() - began < 5
        with pytest.raises(PeerLostError):
            exchange.close()
        exchange.close()

    with pytest.raises(KeyError):
        loopback.run(3, program)


@on_ranks(1)
def test_an_update_changes_the_weights_in_place(ctx: Context) -> None:
    def update(block: Block) -> None:
        block.weights = block.weights - block.gradient

    exchange = GradientExchange(ctx, LAYERS[:1], kind="update", update=update)
    with pytest.raises(PlanError, match="has put another array"):
        exchange.ready(0)
        exchange.wait(0)


def after_an_update_that_raises(ctx: Context) -> GradientExchange:
    """An exchange that rank 0's update has ended; the others made their layer ready."""

    def update(block: Block) -> None:
        raise KeyError("on purpose")

    exchange = GradientExchange(ctx, LAYERS[:1], kind="update", plan="tree", update=update)
    if ctx.rank == 0:
        with pytest.raises(KeyError):
            exchange.ready(0)
            exchange.wait(0, timeout=30)
    else:
        exchange.ready(0)
    return exchange


def test_the_rank_whose_update_raised_is_named_even_after_another_left_because_of_it() -> None:
    told = r"rank 0 has given it up.*update of bucket 0 raised KeyError\('on purpose'\)"
    named, over = [], threading.Event()

    def program(ctx: Context) -> None:
        exchange = after_an_update_that_raises(ctx)
        if ctx.rank == 0:
            assert over.wait(30)
            return
        deadline = time.monotonic() + 30
        while ctx.rank == 2 and ctx.health()[1] != "failed" and time.monotonic() < deadline:
            exchange.turn()
        with pytest.raises(PeerLostError, match=told) as caught:
            exchange.wait(0, timeout=30)
        named.append(caught.value.rank)
        if ctx.rank == 1:
            raise caught.value
        over.set()

    with pytest.raises(PeerLostError, match=told):
        loopback.run(3, program)
    assert named == [0, 0]


@on_ranks(2, mapped=False)
def test_memory_stays_after_an_update_raised_for_peers_that_come_later(ctx: Context) -> None:
    """They write to it by address, and read why it raised."""
    exchange = after_an_update_that_raises(ctx)
    if ctx.rank == 0:
        exchange.close()
        assert not exchange.gradients.deleted
    ctx.barrier()
    if ctx.rank == 1:
        with pytest.raises(PeerLostError, match=r"rank 0 has given it up.*raised KeyError"):
            exchange.wait(0, timeout=30)


@on_ranks(2)
def test_close(ctx: Context) -> None:
    ended: list[Block] = []
    exchange = GradientExchange(ctx, LAYERS, kind="update", update=ended.append)
    for layer in range(3):
        exchange.gradient(layer)[...] = 1
        exchange.ready(layer)
    view = exchange.weight(0)
    exchange.close()  # finishes first, updates included
    assert len(ended) == (3 if ctx.rank == 0 else 0)  # of so few elements rank 0 owns all
    exchange.close()
    assert view.sum() == 0
    assert exchange.gradients.deleted
    assert not ctx.state.servers
    for call in (exchange.ready, exchange.wait, exchange.gradient):
        with pytest.raises(ClosedError, match="closed"):
            call(0)
    exchange.finish()
    left_open = GradientExchange(ctx, LAYERS)
    left_open.ready(0)
    left_open.wait(0)
    ctx.close()
    left_open.close()
    with pytest.raises(ClosedError):
        left_open.ready(0)


@on_ranks(2)
def test_nothing_to_exchange(ctx: Context) -> None:
    for layers in ([], [((0,), "float32")], [((0, 3), "float64"), ((), "float32")]):
        exchange = GradientExchange(ctx, layers)
        for _ in range(2):
            for layer in range(len(layers)):
                exchange.gradient(layer)[...] = ctx.rank
                exchange.ready(layer)
            exchange.finish()
        if len(layers) == 2:
            assert exchange.gradient(1) == 0.5
        exchange.close()


def test_layers_may_be_arrays_tensors_and_parameters() -> None:
    torch = pytest.importorskip("torch")
    linear = torch.nn.Linear(3, 2)
    given = [np.zeros((2, 2)), linear.weight, torch.zeros(3, dtype=torch.bfloat16), (5, "float16")]
    with pgasdl.init(rank=0, size=1, log="warning") as ctx:
        exchange = GradientExchange(ctx, given)
        shapes = [layer.shape for layer in exchange.layers]
        assert shapes == [(2, 2), (2, 3), (3,), (5,)]
        names = [str(layer.dtype) for layer in exchange.layers]
        assert names == ["float64", "float32", "bfloat16", "float16"]
        of = exchange.layers[2]
        tensor = exchange.gradients.torch(torch.bfloat16, of.at, of.shape)
        tensor.fill_(3)
        assert (exchange.gradient(2) == 3).all()


@pytest.mark.parametrize("progress", ["turn", "thread"])
def test_timings(progress: str) -> None:
    case = Case("gdraa", "average")

    def program(ctx: Context) -> None:
        exchange = case.make(ctx)
        for _ in range(2):
            begin = time.monotonic()
            for layer in reversed(range(len(case.shapes))):
                exchange.ready(layer)
            for layer in range(len(case.shapes)):
                exchange.wait(layer)
            end = time.monotonic()
            slack = 1e-3  # between two clocks
            for timing in exchange.timings:
                assert begin - slack <= timing.ready <= timing.began + slack
                assert timing.began <= timing.ended <= timing.waited + slack
                assert timing.waited <= end
                assert 0 <= timing.waiting < 20
        assert "gradient exchange average, plan gdraa: 7 layers in 7 buckets" in ctx.describe()

    loopback.run(3, program, progress=progress)
    loopback.run(1, program, progress=progress)
