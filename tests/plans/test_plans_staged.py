"""Staged: right with two phases; wrong with one, with a slot less, or with any step missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from plan_tools import alterations, deletions, swaps
from tiers import full

from pgasdl.errors import PlanError
from pgasdl.plans import (
    PLANS,
    Plan,
    PlanSpec,
    Put,
    Reduce,
    Span,
    Step,
    Wait,
    build,
    build_all,
    build_phases,
    register,
)
from pgasdl.plans.algorithms import staged
from pgasdl.plans.check import assert_ok, check
from pgasdl.plans.checker.happens_before import happens_before
from pgasdl.plans.checker.symbolic_run import symbolic_run

KINDS = ("average", "sum")
# (count, piece). Small: 1 piece, or 16, the last of 40 elements. Large, with owners: 1, 5, 17 (the
# last has few owners) and 4 pieces.
SMALL = [(0, 16), (1, 16), (5, 65536), (17, 65536), (1000, 65536), (1000, 64)]
LARGE = [(5000, 65536), (5000, 1248), (2100, 128), (10**9, 3 * 10**8)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", full(range(1, 18), quick=3))
def test_it_is_right(size: int, kind: str) -> None:
    # The steps of many ranks differ from those of 6 only in the number of messages.
    cases = SMALL + LARGE if size <= 6 else [(17, 65536), (1000, 480), (5000, 2064)]
    for count, piece in cases:
        layers, seeds = (2, 2) if size <= 4 else (1, 1)
        options = {"piece": piece, "owners": int(size > 3 and count > 1000)}
        assert_ok("staged", size, count, kind=kind, layers=layers, seeds=seeds, **options)


@pytest.mark.parametrize(
    ("size", "owners"), full([(2, 0), (3, 1), (4, 0), (2, 1), (6, 0)], quick=2)
)
def test_it_is_right_whoever_reduces(size: int, owners: int) -> None:
    """With owners where the default has none, and without where it has."""
    for count, piece in SMALL + LARGE:
        assert_ok("staged", size, count, piece=piece, owners=owners, layers=1, seeds=1)
    assert (loads(size, 6000, owners=owners) > 3 * 6000) == (size > 3 and not owners)


@pytest.mark.parametrize("n", full(range(1, 10), quick=3))
def test_any_number_of_pieces(n: int) -> None:
    for size, piece, owners in ((2, 16, 0), (3, 16, 0), (4, 80, 1)):
        options = {"piece": piece, "owners": owners}
        assert_ok("staged", size, n * piece, seeds=3, **options)
        assert_ok("staged", size, n * piece - 15, iterations=9, layers=1, **options)


def test_cost_in_loads() -> None:
    """Few ranks load everything from all; many load each element about three times."""
    assert loads(3, 6000) == 4 * 6000
    assert loads(8, 1000) == 9 * 1000
    for size in (4, 8, 16):
        assert 2 * 64000 < loads(size, 64000) < 3 * 64000


def loads(size: int, count: int, **options: int) -> int:
    steps = build("staged", 1, size, count, piece=16000, **options).lanes[0]
    return sum(step.n * len(step.srcs) for step in steps if isinstance(step, Reduce))


def test_memory_and_notifications() -> None:
    assert build("staged", 0, 1, 100).buffers == {"data": 100}
    assert build("staged", 1, 2, 5, piece=16).buffers == {"data": 5, "inbox": 32}
    assert build("staged", 1, 2, 5).buffers["inbox"] == staged.PIECE + 16
    many = build("staged", 1, 3, 10_000, piece=100)  # rounded up to 112
    assert many.buffers["inbox"] == 8 * 112
    assert many.notifications == 2 * 3 * 90
    assert build("staged", 1, 4, 20_000, piece=4000).notifications == 2 * 4 * (5 + 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"piece": 0}, "piece is 0"),
        ({"phase": 2}, "phase 2"),
        ({"phase": -1}, "phase -1"),
        ({"kind": "update"}, "update"),
        ({"wire": True}, "wire"),
        ({"slots": 3}, "slots"),
        ({"owners": 2}, "owners is 2"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, object], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        build("staged", 0, 2, 8, **options)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="phase"):
        build("gdraa", 0, 2, 8, phase=0)


def test_a_plan_has_at_least_one_phase() -> None:
    with pytest.raises(PlanError, match="0 phases"):
        register(PlanSpec("none", staged.build, "", phases=0))
    assert "none" not in PLANS


# Size, count, piece and owners of the plans that are broken here: 5 pieces, without and with.
MANY = [
    (2, 80, 16, 0), (3, 72, 16, 0), (2, 160, 32, 1), (5, 80, 16, 0), (4, 320, 64, 1),
    (3, 240, 48, 1), (5, 400, 80, 1),
]  # fmt: skip
each_run = pytest.mark.parametrize(("size", "count", "piece", "owners"), full(MANY, quick=3))

Mutant = tuple[str, list[list[Plan]]]


def broken(phases: list[list[Plan]]) -> Iterator[Mutant]:
    """Every deletion of a step, from phase 0 and, with few ranks, also from phase 1."""
    for what, plans in deletions(phases[0]):
        yield f"phase 0, {what}", [plans, phases[1]]
    if len(phases[1]) <= 3:
        for what, plans in deletions(phases[1]):
            yield f"phase 1, {what}", [phases[0], plans]


@each_run
def test_no_step_can_be_deleted(size: int, count: int, piece: int, owners: int) -> None:
    phases = build_phases("staged", size, count, piece=piece, owners=owners)
    survivors = [
        what
        for what, mutant in broken(phases)
        if not check(mutant, iterations=4, seeds=1, layers=1)
    ]
    assert survivors == []


@pytest.mark.parametrize(("size", "count", "piece", "owners"), full([*MANY[:3], MANY[4]], quick=2))
def test_deletions_are_found_without_comparing_the_ranks(
    size: int, count: int, piece: int, owners: int
) -> None:
    phases = build_phases("staged", size, count, piece=piece, owners=owners)
    of_rank_1 = (m for m in broken(phases) if "rank 1, lane 0, step" in m[0])
    survivors = [
        what
        for what, mutant in of_rank_1
        if not happens_before(mutant) and not symbolic_run(mutant, "average", layers=1)
    ]
    assert survivors == []


@pytest.mark.parametrize(
    ("size", "count", "piece", "owners"),
    full([(2, 80, 16, 0), (2, 64, 32, 1), (3, 40, 16, 0), (4, 128, 64, 1)], quick=2),
)
def test_no_field_can_be_changed(size: int, count: int, piece: int, owners: int) -> None:
    phases = build_phases("staged", size, count, piece=piece, owners=owners)
    survivors = [
        what
        for what, plans in alterations(phases[0])
        if not check([plans, phases[1]], seeds=1, layers=1)
    ]
    assert survivors == []


@each_run
def test_flags_come_after_what_they_announce(
    size: int, count: int, piece: int, owners: int
) -> None:
    phases = build_phases("staged", size, count, piece=piece, owners=owners)
    tried = [
        (what, check([plans, phases[1]], seeds=0))
        for _, what, step, after, plans in swaps(phases[0])
        if isinstance(after, Put if isinstance(step, Reduce) else Reduce)
        # A copy from one rank may begin before the last notification: another rank raises that one.
        and not (isinstance(step, Wait) and isinstance(after, Reduce) and len(after.srcs) == 1)
        and not (isinstance(step, Put) and isinstance(after, Reduce))
    ]
    assert tried
    assert [what for what, findings in tried if not findings] == []


@pytest.mark.parametrize(
    ("size", "piece", "owners"), [(2, 16, 0), (3, 16, 0), (2, 32, 1), (4, 64, 1)]
)
def test_a_slot_less_is_too_few(
    size: int, piece: int, owners: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = "SLOTS_WITH_OWNERS" if owners else "SLOTS"
    slots = getattr(staged, number)
    monkeypatch.setattr(staged, number, slots - 1)
    for n in (slots, slots + 1, slots + 2, 9):
        findings = check("staged", size, n * piece, piece=piece, owners=owners)
        assert any(f.rule == "race" and "inbox" in f.text for f in findings)
    assert check("staged", size, (slots - 1) * piece, piece=piece, owners=owners) == []


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("size", full([2, 3, 4], quick=2))
def test_one_phase_is_too_few(size: int, n: int) -> None:
    findings = check(build_all("staged", size, n * 16, piece=16, owners=0))
    assert any(f.rule == "race" and "inbox" in f.text for f in findings)


def test_phases_share_nothing() -> None:
    for size, count, piece in [(2, 16, 16), (3, 32, 16), (4, 16, 16)]:
        first, second = build_phases("staged", size, count, piece=piece)
        shared_flags = [mapped(plan, flags=-size) for plan in second]
        assert "notification" in {f.rule for f in check([first, shared_flags])}
        shared_slots = [mapped(plan, slots=-piece) for plan in second]
        assert "race" in {f.rule for f in check([first, shared_slots])}


def mapped(plan: Plan, *, flags: int = 0, slots: int = 0) -> Plan:
    """The plan with all notifications, or all slots, moved."""

    def at(spans: tuple[Span, ...]) -> tuple[Span, ...]:
        return tuple(
            replace(span, offset=span.offset + slots) if span.buffer == "inbox" else span
            for span in spans
        )

    def change(step: Step) -> Step:
        match step:
            case Put(_, _, _, _, int(notify)):
                return replace(step, notify=notify + flags)
            case Wait(notification):
                return Wait(notification + flags)
            case Reduce(dsts, srcs, _, _):
                return replace(step, dsts=at(dsts), srcs=at(srcs))
        return step

    return replace(plan, lanes=tuple(tuple(map(change, lane)) for lane in plan.lanes))


@pytest.mark.parametrize("size", full([3, 2, 4], quick=1))
def test_arrays_of_different_counts_take_turns_in_one_place(size: int) -> None:
    """Whatever their counts, and whoever reduces them, alternating phases cannot disturb others."""
    piece, counts = 1040, (5, 9000, 2080, 1, 1040, 5, 3120, 7000, 9000, 16)
    wholes = [build("staged", 0, size, max(counts), piece=piece, owners=of) for of in (0, 1)]
    flags = max(whole.notifications for whole in wholes)
    header = {"count": max(counts), "buffers": wholes[0].buffers, "notifications": flags}
    turns = [
        [
            replace(plan, **header)  # type: ignore[arg-type]
            for plan in build_all("staged", size, n, piece=piece, owners=i // 2 % 2, phase=i % 2)
        ]
        for i, n in enumerate(counts)
    ]
    assert happens_before(turns) == []
    wrong = [*turns[:5], *turns[6:]]  # two executions of one phase in a row, without owners
    assert happens_before(wrong) != []


def test_phases_that_differ_are_refused() -> None:
    first, second = build_phases("staged", 2, 100, piece=16)
    longer = [replace(plan, notifications=plan.notifications + 1) for plan in second]
    findings = check([first, longer])
    assert [f.rule for f in findings] == ["invalid"]
    assert "phase 0 has" in findings[0].text
    assert [f.rule for f in check([])] == ["invalid"]
