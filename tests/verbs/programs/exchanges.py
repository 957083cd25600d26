"""Every plan and kind of exchange over verbs, between processes; each rank says what it checked.

Plans that load and store peers' memory must be refused, with an error that names the plan.
"""

from __future__ import annotations

import sys

import numpy as np
from exchange_tools import REFERENCED, Case, cases, expected, train

import pgasdl
from pgasdl import Context, PlanError
from pgasdl.plans import PLANS

N_ITERATIONS = 2


def refused(ctx: Context, plan: str) -> None:
    """The plan is refused by an exchange and by an allreduce."""
    array = np.ones(100, np.float32)
    for attempt in (
        lambda: Case(plan, "average").make(ctx),
        lambda: ctx.allreduce(array, op="mean", plan=plan),
    ):
        try:
            attempt()
        except PlanError as error:
            assert plan in str(error), error
            assert "map" in str(error), error
        else:
            raise AssertionError(f"{plan} ran where no memory is mapped")
    assert (array == 1).all()
    ctx.barrier()


def main(progress: str) -> None:
    with pgasdl.init(progress=progress) as ctx:
        assert not ctx.mapped
        n_checked = n_refused = 0
        for plan in REFERENCED:
            if PLANS[plan].mapped:
                refused(ctx, plan)
                n_refused += 1
                continue
            for case in cases(plan):
                skew = 0.001 if n_checked % 5 == 0 else 0.0
                train(ctx, case, expected(case, ctx.size, N_ITERATIONS), skew=skew)
                n_checked += 1
        print(f"checked {n_checked} cases, {n_refused} plans refused")


if __name__ == "__main__":
    main(sys.argv[1])
