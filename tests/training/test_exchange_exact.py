"""Every plan, kind, dtype and number of ranks gives the bits that NumPy gives."""

from __future__ import annotations

import numpy as np
import pytest
from exchange_tools import (
    REFERENCED,
    Case,
    cases,
    contribution,
    expected,
    reduced,
    same_bits,
    train,
)
from tiers import full

from pgasdl import Block, Context, GradientExchange, loopback

N_ITERATIONS = 3


@pytest.mark.parametrize("size", full([3, 1, 2, 4, 5], quick=1))
@pytest.mark.parametrize("plan", REFERENCED)
def test_all_kinds_and_dtypes(plan: str, size: int) -> None:
    wanted = {case: expected(case, size, N_ITERATIONS) for case in cases(plan)}

    def program(ctx: Context) -> None:
        for case, results in wanted.items():
            train(ctx, case, results)

    loopback.run(size, program)


@pytest.mark.parametrize("plan", ["gdraa", "tree"])
def test_without_mapped_memory(plan: str) -> None:
    wanted = {case: expected(case, 3, 2) for case in cases(plan)}

    def program(ctx: Context) -> None:
        for case, results in wanted.items():
            train(ctx, case, results)

    loopback.run(3, program, mapped=False)


@pytest.mark.parametrize("root", full([1, 0, 4], quick=1))
def test_any_root_of_the_tree(root: int) -> None:
    kinds = [Case("tree", kind, options={"root": root}) for kind in ("average", "update")]
    wanted = {case: expected(case, 5, 2) for case in kinds}

    def program(ctx: Context) -> None:
        for case, results in wanted.items():
            train(ctx, case, results)

    loopback.run(5, program)


def test_layers_longer_than_a_turn() -> None:
    # A reduction of more than 8 MB is cut into turns, and a staged piece has 256 KB.
    shapes = ((1_100_003,), (70_001,), (3,))
    wanted = {
        case: expected(case, 2, 1)
        for case in (
            Case("gdraa-direct", "average", shapes=shapes),
            Case("gdraa", "update", shapes=shapes),
            Case("gdraa", "average", shapes=shapes, wire="bfloat16"),
            Case("staged", "average", shapes=shapes),
            Case("tree", "update", shapes=shapes, bucket_bytes=1 << 20),
        )
    }

    def program(ctx: Context) -> None:
        for case, results in wanted.items():
            train(ctx, case, results)

    loopback.run(2, program)


def test_update_is_average_and_a_local_update() -> None:
    # The NumPy reference already shows this; here the library's own average is the reference.
    average = Case("gdraa", "average", ("float32", "float64"))
    update = Case("gdraa", "update", ("float32", "float64"))

    def program(ctx: Context) -> list[bytes]:
        means, owners = average.make(ctx), update.make(ctx)
        layers = range(len(average.shapes))
        weights = [owners.weight(layer).copy() for layer in layers]
        for iteration in range(4):
            for layer in reversed(layers):
                for exchange in (means, owners):
                    mine = contribution(average, ctx.rank, iteration, layer)
                    exchange.gradient(layer)[...] = mine
                    exchange.ready(layer)
            for layer in layers:
                means.wait(layer)
                owners.wait(layer)
                gradient = means.gradient(layer)
                weights[layer] -= gradient * gradient.dtype.type(0.25)
                assert same_bits(owners.weight(layer), weights[layer])
        return [array.tobytes() for array in weights]

    results = loopback.run(3, program)
    assert results[0] == results[1] == results[2]


def test_buckets_and_kinds_of_plan_change_no_bit() -> None:
    # All of these add in the order of the ranks.
    variants = [
        Case(plan, "average", bucket_bytes=nbytes)
        for plan in ("gdraa", "gdraa-direct", "staged")
        for nbytes in (0, 200, 1 << 20)
    ]

    def program(ctx: Context) -> list[bytes]:
        digests = []
        for case in variants:
            exchange = case.make(ctx)
            for layer in range(len(case.shapes)):
                exchange.gradient(layer)[...] = contribution(case, ctx.rank, 0, layer)
                exchange.ready(layer)
            exchange.finish()
            arrays = [exchange.gradient(layer).tobytes() for layer in range(len(case.shapes))]
            digests.append(b"".join(arrays))
            exchange.close()
        return digests

    results = loopback.run(4, program)
    assert len({digest for digests in results for digest in digests}) == 1


def test_the_reference_would_notice_another_order() -> None:
    case = Case("gdraa", "average")
    terms = [contribution(case, rank, 0, 5) for rank in range(3)]
    assert not same_bits(reduced(case, terms), reduced(case, terms[::-1]))
    in_tree = Case("tree", "average")
    terms = [contribution(case, rank, 0, 5) for rank in range(4)]
    assert not same_bits(reduced(case, terms), reduced(in_tree, terms))
    assert np.isfinite(reduced(case, terms)).all()


@pytest.mark.parametrize(
    "plan", ["gdraa", "gdraa-direct", "tree", "chain", "ring", "halving-doubling"]
)
def test_blocks_are_what_the_owner_updates(plan: str) -> None:
    case = Case(plan, "update", ("float32", "float64"), bucket_bytes=300)

    def program(ctx: Context) -> set[tuple[int, int, int]]:
        updated: set[tuple[int, int, int]] = set()

        def update(block: Block) -> None:
            updated.add((block.bucket, block.offset, block.count))

        with GradientExchange(ctx, case.layers(), kind="update", plan=plan, update=update,
                              bucket_bytes=300) as exchange:  # fmt: skip
            for layer in range(len(case.shapes)):
                exchange.ready(layer)
            exchange.finish()
            blocks = exchange.blocks
            assert updated == {(each.bucket, each.offset, each.count) for each in blocks}
            assert all(each.weights.size == each.count for each in blocks)
            return updated

    owned = loopback.run(3, program)
    assert not set.intersection(owned[0], owned[1]) and not set.intersection(owned[0], owned[2])
    assert set.union(*owned)
