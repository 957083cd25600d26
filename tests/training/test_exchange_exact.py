"""Every plan, kind, dtype and number of ranks gives the bits that NumPy gives."""

from __future__ import annotations

import numpy as np
import pytest
from exchange_tools import (
    REFERENCED,
    Case,
    cases,
    contribution,
    reduced,
    same_bits,
    trained,
)
from tiers import full

from pgasdl import Block, Context, GradientExchange, loopback

N_ITERATIONS = 3


@pytest.mark.parametrize("size", full([3, 1, 2, 4, 5], quick=1))
@pytest.mark.parametrize("plan", REFERENCED)
def test_all_kinds_and_dtypes(plan: str, size: int) -> None:
    trained(size, cases(plan), N_ITERATIONS)


@pytest.mark.parametrize("plan", ["gdraa", "tree"])
def test_without_mapped_memory(plan: str) -> None:
    trained(3, cases(plan), 2, mapped=False)


@pytest.mark.parametrize("root", full([1, 0, 4], quick=1))
def test_any_root_of_the_tree(root: int) -> None:
    trained(5, [Case("tree", kind, options={"root": root}) for kind in ("average", "update")], 2)


def test_layers_longer_than_a_turn() -> None:
    # A reduction of more than 8 MB is cut into turns, and a staged piece has 256 KB.
    shapes = ((1_100_003,), (70_001,), (3,))
    several = (
        Case("gdraa-direct", "average", shapes=shapes),
        Case("gdraa", "update", shapes=shapes),
        Case("gdraa", "average", shapes=shapes, wire="bfloat16"),
        Case("staged", "average", shapes=shapes),
        Case("tree", "update", shapes=shapes, bucket_bytes=1 << 20),
    )
    trained(2, several, 1)


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
