"""Executions are numbered by 20 bits: after a million of them the numbers begin anew."""

from __future__ import annotations

import numpy as np
import pytest
from exchange_tools import Case, expected, train

from pgasdl import Context, loopback


@pytest.mark.parametrize("plan", ["gdraa", "staged", "tree"])
def test_allreduce_when_the_numbers_begin_anew(plan: str) -> None:
    def program(ctx: Context) -> None:
        array = np.zeros(40, np.float32)
        for call in range(12):
            if call == 4:
                # As if a million calls had been made; there is no faster way there.
                (sequence,) = ctx._allreduces._sequences.values()
                sequence.calls.number += (1 << 20) - 8
            array[:] = 10 * call + ctx.rank
            ctx.allreduce(array, plan=plan)
            np.testing.assert_array_equal(array, 10 * call + 1, f"call {call}")

    for seed in range(5):
        loopback.run(3, program, seed=seed, delay=2, reorder=True)


@pytest.mark.parametrize("plan", ["gdraa", "gdraa-direct", "staged", "tree"])
def test_exchange_when_the_numbers_begin_anew(plan: str) -> None:
    case = Case(plan, "average")
    wanted = expected(case, 3, 6)

    def program(ctx: Context) -> None:
        exchange = case.make(ctx)
        for bucket in exchange._buckets:
            for bound in bucket.bound:
                bound.run(generation=(1 << 20) - 4)
        train(ctx, case, wanted, exchange=exchange)

    for seed in range(3):
        loopback.run(3, program, seed=seed, delay=2, reorder=True)
