"""The checker is checked: it must find a fault in every plan that was broken on purpose."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from plan_tools import (
    SCORE,
    TELLING,
    Variant,
    alterations,
    averages_quick,
    deletions,
    equivalent,
    swaps,
    with_step,
)
from tiers import full

from pgasdl.errors import PlanError
from pgasdl.plans import Flush, Plan, Put, Reduce, Span, Step, Wait, build_all
from pgasdl.plans.check import assert_ok, check
from pgasdl.plans.checker.happens_before import happens_before
from pgasdl.plans.checker.symbolic_run import symbolic_run

Plans = list[Plan]
# In wire precision only these plans differ from each other.
WITH_WIRE = ("gdraa", "tree", "ring")
MUTATED = [each for each in TELLING if not each.wire or each.name in WITH_WIRE]
each_variant = pytest.mark.parametrize("variant", averages_quick(MUTATED), ids=str)


def judge(what: str, mutants: Iterable[tuple[str, Plans, str | None]], variant: Variant) -> None:
    """Check mutants and count the outcomes; each must be killed, unless it has an excuse."""
    survivors = []
    for text, mutant, excuse in mutants:
        killed = bool(variant.check(mutant, len(mutant), seeds=1, layers=1))
        SCORE[what, "killed" if killed else excuse or "survived"] += 1
        if not killed and excuse is None:
            survivors.append(text)
    assert survivors == []


@each_variant
@pytest.mark.parametrize("size", full([2, 3, 5], quick=1))
def test_no_step_can_be_deleted(variant: Variant, size: int) -> None:
    many = 20_000 if variant.wire and variant.name == "gdraa" and size < 5 else 100
    for count in {1 if size < 5 else 100, 100, many}:
        mutants = deletions(variant.plans(size, count))
        judge("step deleted", ((what, mutant, None) for what, mutant in mutants), variant)


@pytest.mark.full
@each_variant
def test_deletions_are_found_without_comparing_the_ranks(variant: Variant) -> None:
    """The proof and one schedule find by themselves what validate_all would refuse."""
    for size, count in ((2, 1), (3, 100)):
        root = variant.chosen(size).get("root", 0)
        survivors = [
            what
            for what, mutant in deletions(variant.plans(size, count))
            if not happens_before([mutant]) and not symbolic_run([mutant], variant.kind, root=root)
        ]
        assert survivors == []


@each_variant
@pytest.mark.parametrize("size", full([2, 3], quick=1))
def test_no_field_can_be_changed(variant: Variant, size: int) -> None:
    mutants = alterations(variant.plans(size, 100))
    judge("field changed", ((what, mutant, None) for what, mutant in mutants), variant)


@each_variant
@pytest.mark.parametrize("size", full([3, 5], quick=1))
def test_steps_that_need_each_other_cannot_be_swapped(variant: Variant, size: int) -> None:
    """Mutants that survive are right plans, each for a known reason."""
    plans = variant.plans(size, 100)
    mutants = (
        (what, mutant, equivalent(plans, rank, step, after))
        for rank, what, step, after, mutant in swaps(plans)
    )
    judge("steps swapped", mutants, variant)


@each_variant
def test_every_flush_is_needed(variant: Variant) -> None:
    plans = variant.plans(4, 100)
    for plan in plans:
        for lane, index, step in plan.steps():
            if isinstance(step, Flush):
                findings = variant.check(with_step(plans, plan.rank, lane, index), 4)
                races = [f for f in findings if f.rule == "race"]
                assert races
                assert {f.rank for f in races} == {plan.rank}
                live = variant.kind == "update" or not variant.wire
                assert any("a Flush" in f.text for f in races) == live


@pytest.mark.parametrize("wire", [False, True])
@pytest.mark.parametrize(("name", "size"), [("gdraa", 3), ("gdraa", 5), ("tree", 3), ("tree", 5)])
def test_one_slot_too_few(name: str, size: int, wire: bool) -> None:
    plans = build_all(name, size, 100, wire=wire)
    inbox = "wire_in" if wire else "inbox"
    slots = {
        step.dst.offset
        for plan in plans
        for _, _, step in plan.steps()
        if isinstance(step, Put) and step.dst.buffer == inbox
    }
    last = max(slots)
    merged = [merge(plan, inbox, last) for plan in plans]
    findings = check(merged)
    assert any(f.rule == "race" and inbox in f.text for f in findings)
    short = {**plans[0].buffers, inbox: last}
    findings = check([replace(plan, buffers=short) for plan in plans])
    assert [f.rule for f in findings] == ["invalid"]
    assert "leaves its buffer" in findings[0].text


def merge(plan: Plan, inbox: str, last: int) -> Plan:
    """The last slot becomes the first, for the senders as for the receiver."""

    def at(span: Span) -> Span:
        return Span(inbox, 0) if span == Span(inbox, last) else span

    def change(step: Step) -> Step:
        if isinstance(step, Put):
            return replace(step, dst=at(step.dst))
        if isinstance(step, Reduce):
            return replace(step, srcs=tuple(map(at, step.srcs)))
        return step

    return replace(plan, lanes=tuple(tuple(map(change, lane)) for lane in plan.lanes))


DATA = Span("data", 0)
INBOX = Span("inbox", 0)


def pair(*lanes: tuple[tuple[Step, ...], ...], notifications: int = 2) -> list[Plan]:
    """Hand-made plans, given each rank's lanes."""
    buffers = {"data": 8, "inbox": 8}
    return [
        Plan("toy", rank, len(lanes), 8, mine, buffers, notifications)
        for rank, mine in enumerate(lanes)
    ]


def rules(plans: list[Plan]) -> set[str]:
    return {finding.rule for finding in happens_before([plans])}


def test_one_way_traffic_needs_credits() -> None:
    send = (Put(DATA, 8, 1, INBOX, 0), Flush())
    receive = (Wait(0), Reduce((DATA,), (INBOX,), 8))
    assert rules(pair((send,), (receive,))) == {"race", "notification"}
    credit = Put(DATA, 0, 0, DATA, 1)
    assert rules(pair(((*send, Wait(1)),), ((*receive, credit),))) == set()
    # A credit that is given before the slot was read protects nothing.
    early = (receive[0], credit, receive[1])
    assert rules(pair(((*send, Wait(1)),), (early,))) == {"race"}


def test_a_flag_covers_earlier_puts_of_its_lane_to_its_peer_only() -> None:
    payload, flag = Put(DATA, 8, 1, INBOX), Put(DATA, 0, 1, DATA, 0)
    receive = (Wait(0), Reduce((DATA,), (INBOX,), 8), Put(DATA, 0, 0, DATA, 1))
    done = (Flush(), Wait(1))
    assert rules(pair(((payload, flag, *done),), (receive,))) == set()
    assert rules(pair(((flag, payload, *done),), (receive,))) == {"race"}
    assert rules(pair(((payload, *done), (flag,)), (receive,))) == {"race"}


def test_lanes_are_ordered_by_nothing_but_notifications() -> None:
    answer = (Wait(0), Put(DATA, 0, 0, DATA, 1))
    touch = Reduce((DATA,), (DATA,), 8)
    ask = Put(DATA, 0, 1, DATA, 0)
    one = (ask, Wait(1), touch)
    assert rules(pair((one,), (answer,))) == set()
    assert rules(pair((one, (touch,)), (answer,))) == {"race"}
    assert rules(pair(((touch, ask), (Wait(1), touch)), (answer,))) == set()


def test_a_cycle_of_waits_is_reported_with_who_owes_whom() -> None:
    first = (Wait(0), Put(DATA, 0, 1, DATA, 0))
    second = (Wait(0), Put(DATA, 0, 0, DATA, 0))
    findings = check(pair((first,), (second,), notifications=1), kind="sum")
    assert [(f.rule, f.rank, f.step) for f in findings] == [("deadlock", 0, 0), ("deadlock", 1, 0)]
    assert "owed by rank 1, lane 0, step 1, which is at step 0 of iteration 0" in findings[0].text
    stuck = symbolic_run([pair((first,), (second,), notifications=1)], "sum", layers=1)
    assert {f.rule for f in stuck} == {"deadlock"}


def test_ranks_that_add_in_different_orders_are_told_apart() -> None:
    def exchange(peer: int, *srcs: Span) -> tuple[Step, ...]:
        acknowledge = Put(DATA, 0, peer, DATA, 1)
        add = Reduce((DATA,), srcs, 8)
        return (Put(DATA, 8, peer, INBOX, 0), Wait(0), acknowledge, Wait(1), add)

    alike = pair((exchange(1, DATA, INBOX),), (exchange(0, INBOX, DATA),))
    assert symbolic_run([alike], "sum", iterations=1) == []
    different = pair((exchange(1, DATA, INBOX),), (exchange(0, DATA, INBOX),))
    findings = symbolic_run([different], "sum", iterations=1)
    assert findings
    assert all("not the bits that rank" in finding.text for finding in findings)


def test_findings_are_raised_as_one_error() -> None:
    plans = build_all("gdraa", 3, 100)
    broken = with_step(plans, 1, 0, len(plans[1].lanes[0]) - 1)
    with pytest.raises(PlanError, match="race: plan gdraa, rank 1, lane 0, step"):
        assert_ok(broken)
