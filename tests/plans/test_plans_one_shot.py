"""One-shot and gdraa-private: right in phases and pieces; wrong with a phase or a slot less."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plan_tools import deletions
from tiers import full

from pgasdl.errors import PlanError
from pgasdl.plans import build, build_all, build_phases
from pgasdl.plans.algorithms import gdraa_private, one_shot
from pgasdl.plans.check import assert_ok, check
from pgasdl.plans.checker.happens_before import happens_before
from pgasdl.plans.plan import Plan

CASES = [(0, 16), (1, 16), (5, 65536), (1000, 65536), (1000, 64), (130, 16)]


@pytest.mark.parametrize("name", ["one-shot", "gdraa-private"])
@pytest.mark.parametrize("size", full([1, 2, 3, 4, 5, 7, 9], quick=3))
def test_it_is_right(size: int, name: str) -> None:
    for kind in ("average", "sum"):
        for count, piece in CASES:
            assert_ok(name, size, count, kind=kind, piece=piece, layers=1, seeds=1)


def test_inboxes() -> None:
    assert build("one-shot", 1, 2, 5, piece=16).buffers == {"data": 5, "inbox": 16 + 16}
    assert build("one-shot", 1, 3, 1000, piece=96).buffers["inbox"] == 2 * 4 * 2 * 96 - 96 + 96
    assert build("gdraa-private", 1, 2, 5, piece=64).buffers["inbox"] == 2 * 32
    assert build("gdraa-private", 1, 3, 200, piece=64).buffers["inbox"] == 2 * 2 * 2 * 32


@pytest.mark.parametrize("size", [2, 3])
def test_no_step_can_be_deleted(size: int) -> None:
    phases = build_phases("one-shot", size, 80, piece=16)
    survivors = [
        what
        for what, plans in deletions(phases[0])
        if not check([plans, phases[1]], iterations=4, seeds=1, layers=1)
    ]
    # A Flush ends also when the pieces after its own have left.
    assert all("Flush" in what for what in survivors), survivors


@pytest.mark.parametrize("module", [one_shot, gdraa_private])
def test_a_slot_less_is_too_few(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOTS", module.SLOTS - 1)
    findings = check(module.SPEC.name, 3, 9 * 16, piece=16)
    assert any(f.rule == "race" and "inbox" in f.text for f in findings)


@pytest.mark.parametrize("size", [2, 3])
def test_one_phase_is_too_few(size: int) -> None:
    findings = check(build_all("one-shot", size, 32, piece=16))
    assert any(f.rule == "race" and "inbox" in f.text for f in findings)


def turns_of(name: str, size: int, numbers: list[int]) -> list[list[Plan]]:
    """Executions of arrays of different counts, in one place, in the phases of these numbers."""
    counts = (5, 900, 208, 1, 104, 5, 312, 700, 900, 16)
    whole = build(name, 0, size, max(counts), piece=64)
    header = {"count": whole.count, "buffers": whole.buffers, "notifications": whole.notifications}
    turns = []
    for number, count in zip(numbers, counts, strict=True):
        phases = build_phases(name, size, count, piece=64)
        plans = phases[number % len(phases)]
        turns.append([replace(plan, **header) for plan in plans])  # type: ignore[arg-type]
    return turns


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["one-shot", "gdraa-private"])
def test_arrays_of_different_counts_take_turns_in_one_place(size: int, name: str) -> None:
    assert happens_before(turns_of(name, size, list(range(10)))) == []


@pytest.mark.parametrize("size", [2, 3])
def test_two_executions_of_one_phase_in_a_row_are_found(size: int) -> None:
    assert happens_before(turns_of("one-shot", size, [0, 1, 0, 1, 1, 0, 1, 0, 1, 0])) != []


@pytest.mark.parametrize("options", [{"piece": 0}, {"wire": True}, {"kind": "update"}])
@pytest.mark.parametrize("name", ["one-shot", "gdraa-private"])
def test_what_it_cannot_do_is_refused(name: str, options: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        build(name, 0, 2, 8, **options)  # type: ignore[arg-type]
