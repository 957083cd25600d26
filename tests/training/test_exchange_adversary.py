"""Delay, reordering, late source reads, lagging ranks, no barrier: the bits stay the same."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from exchange_tools import Case, contribution, expected, pause, same_bits, train, trained
from tiers import full

from pgasdl import Context, loopback
from pgasdl.plans import PLANS, Flush, Plan

CASES = (
    Case("gdraa", "average"),
    Case("gdraa", "update", bucket_bytes=500),
    Case("gdraa", "average", wire="bfloat16", bucket_bytes=500),
    Case("gdraa-direct", "average", bucket_bytes=500),
    Case("gdraa-direct", "update"),
    Case("staged", "average"),
    Case("tree", "average", wire="bfloat16"),
    Case("tree", "update", bucket_bytes=500),
)
ADVERSARIES: tuple[dict[str, Any], ...] = (
    {"seed": 1, "delay": 4},
    {"seed": 2, "delay": 2, "reorder": True},
    {"seed": 3, "delay": 3, "late_source": True},
    {"seed": 4, "delay": 2, "reorder": True, "late_source": True, "refuse": 2},
    {
        "seed": 5,
        "delay": 2,
        "reorder": True,
        "late_source": True,
        "refuse": 1,
        "progress": "thread",
    },
)


@pytest.mark.parametrize("adversary", ADVERSARIES, ids=lambda a: f"seed{a['seed']}")
@pytest.mark.parametrize("size", full([3, 2, 5], quick=1))
def test_adversary(size: int, adversary: dict[str, Any]) -> None:
    trained(size, CASES, 4, **adversary)


@pytest.mark.parametrize("progress", ["turn", "thread"])
@pytest.mark.parametrize("size", full([2, 4], quick=1))
def test_lagging_ranks(size: int, progress: str) -> None:
    """Ranks lag by far more than an exchange takes, at any layer of any of 12 iterations."""
    cases = CASES[1], CASES[4], CASES[5]
    adversary = {"seed": size, "delay": 1, "reorder": True, "late_source": True}
    trained(size, cases, 12, skew=0.003, progress=progress, **adversary)


def test_several_exchanges_at_once() -> None:
    """Two models on all three ranks and one on two of them, in each rank's own order."""
    size, n_iterations = 3, 5
    first, second = Case("gdraa", "update"), Case("tree", "average", ("float64",))
    pair = Case("gdraa-direct", "average", shapes=((50,), (3,)))
    wanted = {
        first: expected(first, size, n_iterations),
        second: expected(second, size, n_iterations),
        pair: expected(pair, 2, n_iterations),
    }

    def program(ctx: Context) -> None:
        models = [(first, first.make(ctx), ctx.rank), (second, second.make(ctx), ctx.rank)]
        if ctx.rank != 1:
            group = ctx.group([0, 2])
            models.append((pair, pair.make(ctx, group=group), group.rank))
        dice = random.Random(ctx.rank)
        for iteration in range(n_iterations):
            steps = [(model, layer) for model in models for layer in range(len(model[0].shapes))]
            for (case, exchange, rank), layer in dice.sample(steps, len(steps)):
                exchange.gradient(layer)[...] = contribution(case, rank, iteration, layer)
                pause(dice, 0.001)
                exchange.ready(layer)
            for (case, exchange, _), layer in dice.sample(steps, len(steps)):
                exchange.wait(layer)
                update = case.kind == "update"
                found = exchange.weight(layer) if update else exchange.gradient(layer)
                assert same_bits(found, wanted[case][iteration][layer])

    loopback.run(size, program, seed=9, delay=1, reorder=True)


def test_layers_end_one_by_one() -> None:
    """A layer's exchange ends on all ranks before the other layer's has begun on any."""
    case = Case("gdraa", "average", shapes=((5,), (6,)))

    def program(ctx: Context) -> list[float]:
        exchange = case.make(ctx)
        flags = ctx.segment(0, notifications=3)
        results = []
        for iteration in range(3):
            exchange.gradient(0)[...] = 10 * iteration + ctx.rank
            exchange.ready(0)
            exchange.wait(0)
            ctx.notify(1 - ctx.rank, flags, iteration)
            ctx.notify_waitsome(flags, iteration, 1)
            exchange.gradient(1)[...] = ctx.rank
            exchange.ready(1)
            exchange.wait(1)
            results += [float(exchange.gradient(0)[0]), float(exchange.gradient(1)[0])]
        return results

    assert loopback.run(2, program) == [[0.5, 0.5, 10.5, 0.5, 20.5, 0.5]] * 2


@pytest.mark.parametrize("plan", ["gdraa", "tree"])
def test_the_adversary_finds_a_missing_flush(
    plan: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = PLANS[plan]

    def build(*place: int, **options: Any) -> Plan:
        built = spec.build(*place, **options)
        lanes = [[step for step in lane if not isinstance(step, Flush)] for lane in built.lanes]
        return dataclasses.replace(built, lanes=tuple(map(tuple, lanes)))

    case = Case(plan, "average", shapes=((1000,),) * 4)
    wanted = expected(case, 3, 8)
    monkeypatch.setitem(PLANS, plan, dataclasses.replace(spec, build=build))
    n_found = 0
    for seed in range(10):
        try:
            loopback.run(3, lambda ctx: train(ctx, case, wanted), seed=seed, delay=3,
                         reorder=True, late_source=True, trace=str(tmp_path))  # fmt: skip
        except AssertionError:
            n_found += 1
    assert n_found
