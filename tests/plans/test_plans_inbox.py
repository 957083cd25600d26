"""What a plan's row says of its inbox is what the built plan has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pgasdl.plans import EXCHANGES, PLANS, Members, register
from pgasdl.plans.pieces import build_array, inbox_of

# By plan: options other than the defaults.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "tree": [{"group_size": 2}, {"group_size": (1, 3, 1), "root": 2}, {"root": 1, "chunks": 3}],
    "kary": [{"arity": 1}, {"arity": 3, "root": 2}],
    "chain": [{"chunks": 4, "root": 1}],
    "chain-chain": [{"chain_size": 2, "root": 3}, {"chain_size": (2, 3), "chunks": 2}],
    "chain-binomial": [{"chain_size": 2, "root": 3}, {"chain_size": (2, 3), "chunks": 2}],
    "halving-doubling": [{"group_size": 2}],
    "gdraa-nodes": [{"group_size": 2}, {"group_size": (2, 3)}, {"group_size": 3, "direct": 1}],
    "gdraa-private": [{"piece": 40}, {"piece": 7}],
    "one-shot": [{"piece": 48}],
    "staged": [{"piece": 48}, {"piece": 100, "owners": 0}, {"piece": 100, "owners": 1}],
}
EXCHANGING = [name for name, spec in PLANS.items() if "sum" in spec.kinds]


@pytest.mark.parametrize("name", EXCHANGING)
def test_a_row_says_how_long_the_inbox_is(name: str) -> None:
    assert PLANS[name].inbox is not None
    assert set(EXCHANGES) & set(PLANS[name].kinds)
    for size in (1, 2, 3, 5, 8):
        for options in ({}, *OPTIONS.get(name, ())):
            sizes = options.get("group_size", options.get("chain_size"))
            if isinstance(sizes, tuple) and sum(sizes) != size:
                continue
            if options.get("root", 0) >= size:
                continue
            order = tuple(reversed(range(size))) if size % 2 else ()
            members = Members(size, order=order)
            for pieces in ((0,), (1,), (100,), (1000, 1000, 3)):
                said = inbox_of(name, members, pieces, kind="sum", **options)
                for rank in {0, size - 1}:
                    plan = build_array(name, rank, members, pieces, kind="sum", **options).first
                    assert said == plan.buffers.get("inbox", 0), (size, options, pieces, rank)


def test_the_inbox_of_a_row_that_does_not_say_is_that_of_the_plan() -> None:
    register(replace(PLANS["gdraa"], name="mine", inbox=None))
    try:
        members = Members(3)
        assert inbox_of("mine", members, (100,), kind="sum") == 96
        assert inbox_of("gdraa", members, (100,), kind="sum") == 96
    finally:
        del PLANS["mine"]
