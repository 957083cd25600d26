"""Arrays of different counts, and different plans, take turns on one inbox, as in ctx.allreduce."""

from __future__ import annotations

import random
import runpy
from dataclasses import replace

import pytest
from plan_tools import OPTIONS
from support.places import APPS
from tiers import full

from pgasdl.plans import PLANS, Plan, Put, Step, Wait, build_all
from pgasdl.plans.checker.happens_before import happens_before

# Staged has its own inbox there, and its own test of this.
SHARING = [
    name for name, spec in PLANS.items() if spec.shares and name not in ("staged", "one-shot")
]
COUNTS = (5, 900, 17, 200, 1, 64, 1000, 33)

Turn = list[Plan]


def together(turns: list[Turn], regions: list[int]) -> list[Turn]:
    """Executions one after another in the same memory, each with notifications of its region."""
    every = [plan for turn in turns for plan in turn]
    buffers = {name: max(plan.buffers.get(name, 0) for plan in every) for name in ("data", "inbox")}
    most = max(plan.notifications for plan in every)
    count = buffers["data"]

    def place(plan: Plan, region: int) -> Plan:
        lanes = tuple(tuple(shifted(s, region * most) for s in lane) for lane in plan.lanes)
        flags = most * (max(regions) + 1)
        return replace(plan, lanes=lanes, buffers=buffers, count=count, notifications=flags)

    return [
        [place(plan, region) for plan in turn] for turn, region in zip(turns, regions, strict=True)
    ]


def shifted(step: Step, by: int) -> Step:
    """The step with its notification in another region."""
    if isinstance(step, Put) and step.notify is not None:
        return replace(step, notify=step.notify + by)
    return replace(step, notification=step.notification + by) if isinstance(step, Wait) else step


@pytest.mark.parametrize("size", full([3, 2, 4, 5, 7], quick=1))
@pytest.mark.parametrize("name", SHARING)
def test_counts_take_turns(name: str, size: int) -> None:
    for options in ({}, *OPTIONS.get(name, ())):
        chosen = {key: n % size for key, n in options.items() if key == "root"} | {
            key: n for key, n in options.items() if key != "root"
        }
        turns = [build_all(name, size, count, **chosen) for count in COUNTS]
        assert happens_before(together(turns, [0] * len(turns)), len(turns)) == [], chosen


@pytest.mark.parametrize("seed", full(range(12), quick=4))
def test_plans_take_turns(seed: int) -> None:
    dice = random.Random(seed)
    size = 2 + seed % 5
    names = [dice.choice(SHARING) for _ in range(10)]
    turns = [build_all(name, size, dice.choice(COUNTS)) for name in names]
    assert happens_before(together(turns, list(map(SHARING.index, names))), len(turns)) == []


def test_a_plan_that_does_not_share_would_disturb_others() -> None:
    """The example in apps/ ends without knowing whether the others have: used so, it has a race."""
    flat = runpy.run_path(str(APPS / "own_plan.py"))["flat"]
    del PLANS["flat"]  # it registers itself, and other tests load it, too

    def turns(*counts: int) -> list[Turn]:
        return [[flat(rank, 3, n, phase=i % 2) for rank in range(3)] for i, n in enumerate(counts)]

    assert happens_before(together(turns(64, 64, 64, 64), [0] * 4), 4) == []
    findings = happens_before(together(turns(64, 32, 64, 48), [0] * 4), 4)
    assert any(f.rule == "race" and "inbox" in f.text for f in findings)
