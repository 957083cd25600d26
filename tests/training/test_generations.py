"""The number of an execution, its generation, has 12 bits: after 4095 executions it starts anew."""

from __future__ import annotations

import numpy as np
import pytest
from exchange_tools import Case, expected, train
from support.ranks import on_ranks
from tiers import full

from pgasdl import Context, loopback

GENERATIONS = 4095


@pytest.mark.parametrize("plan", full(["staged", "gdraa", "tree"], quick=1))
@on_ranks(3, seed=1, delay=2, reorder=True)
def test_allreduce_when_the_numbers_begin_anew(ctx: Context, plan: str) -> None:
    array = np.zeros(40, np.float32)
    for call in range(GENERATIONS + 8):
        array[:] = 10 * call + ctx.rank
        ctx.allreduce(array, op="mean", plan=plan)
        if call < 4 or call > GENERATIONS - 4:
            np.testing.assert_array_equal(array, 10 * call + 1, f"call {call}")


@pytest.mark.parametrize("plan", full(["gdraa", "gdraa-direct", "tree"], quick=1))
def test_exchange_when_the_numbers_begin_anew(plan: str) -> None:
    case = Case(plan, "average")
    wanted = expected(case, 2, 6)

    def program(ctx: Context) -> None:
        exchange = case.make(ctx)
        layers = range(len(case.shapes))
        for layer in layers:
            exchange.gradient(layer)[...] = 0
        for _ in range(GENERATIONS - 3):
            for layer in layers:
                exchange.ready(layer)
            for layer in layers:
                exchange.wait(layer)
        train(ctx, case, wanted, exchange=exchange)

    loopback.run(2, program, seed=1, delay=1, reorder=True)
