"""The example of a plan from outside the package, as a user starts it, and in an exchange."""

from __future__ import annotations

import runpy

import jobs
import numpy as np
import pytest

from pgasdl import Context, GradientExchange, PlanError, loopback
from pgasdl.plans import PLANS, PlanSpec, register

PROGRAM = jobs.APPS / "own_plan.py"


def test_it_runs_in_under_60_lines() -> None:
    assert len(PROGRAM.read_text(encoding="utf-8").splitlines()) < 60
    out = jobs.run(3, PROGRAM)
    said = "right for 1 to 8 ranks; with one phase: race"
    ends = [
        f"rank {rank} of 3: <Collective average of float32 x 1000, plan flat>" for rank in range(3)
    ]
    simulated = [line for line in out.splitlines() if "simulated" in line]
    assert [line.split()[-3] for line in simulated] == ["flat", "gdraa"]
    assert sorted(set(out.splitlines()) - set(simulated)) == sorted(
        [f"[0] {said}", *(f"[{rank}] {end}" for rank, end in enumerate(ends))]
    )
    assert said in jobs.run(0, PROGRAM)


def test_everything_takes_it_like_any_other() -> None:
    flat = runpy.run_path(str(PROGRAM))["flat"]

    def program(ctx: Context) -> None:
        exchange = GradientExchange(ctx, [((5,), np.float32), ((3, 3), np.float64)], plan="flat")
        for turn in range(4):
            for layer in (1, 0):
                exchange.gradient(layer)[...] = ctx.rank * turn
                exchange.ready(layer)
            for layer in (0, 1):
                exchange.wait(layer)
                assert (exchange.gradient(layer) == turn).all()
        with pytest.raises(PlanError, match="allreduce_handle"):
            ctx.allreduce(np.ones(3, np.float32), plan="flat")

    register(PlanSpec("flat", flat, "", ("average", "sum"), wire=False, phases=2))
    try:
        loopback.run(3, program)
        loopback.run(3, program, seed=3, delay=2, reorder=True, late_source=True, mapped=False)
    finally:
        del PLANS["flat"]
