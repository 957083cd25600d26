"""Spin models of the buffer protocols: right as they are, wrong with a credit or flush dropped.

Spin explores all states of a few ranks; the checker must reach the same verdict on the plan that
the model describes, whole and broken in the same way.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tiers import full

from pgasdl.plans import PLANS, Flush, Plan, Put, Step, Wait, build_phases
from pgasdl.plans.checker.happens_before import happens_before
from pgasdl.plans.checker.symbolic_run import symbolic_run
from pgasdl.plans.registry import OWN

MODELS = Path(__file__).parent / "spin"
Phases = list[list[Plan]]


def without(phases: Phases, dropped: Callable[[Step], bool]) -> Phases:
    """All plans without some of their steps."""

    def kept(plan: Plan) -> Plan:
        lanes = tuple(tuple(s for s in lane if not dropped(s)) for lane in plan.lanes)
        return replace(plan, lanes=lanes)

    return [[kept(plan) for plan in plans] for plans in phases]


def no_flush(phases: Phases) -> Phases:
    return without(phases, lambda step: isinstance(step, Flush))


def no_credit(phases: Phases) -> Phases:
    """Without the notifications that come without data: neither raised nor waited for."""
    return without_flags(phases, range(10**6))


def without_flags(phases: Phases, numbers: range) -> Phases:
    """Without those of the notifications ``numbers`` that come without data."""
    alone = {
        (step.peer, step.notify)
        for plans in phases
        for plan in plans
        for _, _, step in plan.steps()
        if isinstance(step, Put) and step.n == 0 and step.notify in numbers
    }
    return [
        [
            without(
                [[plan]],
                lambda step, me=plan.rank: (  # type: ignore[misc]
                    (isinstance(step, Put) and (step.peer, step.notify) in alone)
                    or (isinstance(step, Wait) and (me, step.notification) in alone)
                ),
            )[0][0]
            for plan in plans
        ]
        for plans in phases
    ]


def no_wait(phases: Phases) -> Phases:
    """GDRAA without waiting for results."""
    return without(phases, lambda s: isinstance(s, Wait) and s.notification >= len(phases[0]))


def no_result(phases: Phases) -> Phases:
    """A pipeline without its lanes down, except for the root's part of them."""
    return [[replace(plan, lanes=plan.lanes[:1]) for plan in plans] for plans in phases]


def one_phase(phases: Phases) -> Phases:
    return phases[:1]


def no_ready(phases: Phases) -> Phases:
    return without_flags(phases, range(3))


def no_done(phases: Phases) -> Phases:
    return without_flags(phases, range(3, 6))


def no_reduced(phases: Phases) -> Phases:
    """Staged with owners that do not say that their block is reduced."""
    return without_flags(phases, range(6, 12))


def no_mate(phases: Phases) -> Phases:
    """Two nodes of two ranks that do not wait for the mate's block."""
    return without(phases, lambda step: isinstance(step, Wait) and step.notification >= 6)


@dataclass(frozen=True)
class Model:
    """A model with the plan that it describes, and ways to break both."""

    name: str
    plan: str
    kind: str = "average"
    defines: tuple[str, ...] = ()
    options: dict[str, int] = field(default_factory=dict, hash=False)
    broken: dict[str, Callable[[Phases], Phases]] = field(default_factory=dict, hash=False)
    count: int = 48
    size: int = 3

    def __str__(self) -> str:
        return "-".join((self.name, *self.defines))

    def phases(self) -> Phases:
        return build_phases(self.plan, self.size, self.count, kind=self.kind, **self.options)


FLUSH = {"NO_FLUSH": no_flush}
BOTH = {"NO_FLUSH": no_flush, "NO_CREDIT": no_credit}
TWO_CHUNKS = {"chunks": 2}
NAMED = [
    Model("gdraa", "gdraa", broken={**FLUSH, "NO_WAIT": no_wait}),
    Model("gdraa", "gdraa", "reduce-scatter", ("ONE_WAY",), broken=BOTH),
    Model(
        "gdraa",
        "gdraa-private",
        defines=("PRIVATE",),
        broken={**FLUSH, "NO_WAIT": no_wait},
    ),
    Model("one_shot", "one-shot", broken={**FLUSH, "ONE_PHASE": one_phase}),
    Model("tree", "tree", broken=FLUSH),
    Model("tree", "tree", "reduce", ("REDUCE",), broken=BOTH),
    Model("tree", "tree", "broadcast", ("BROADCAST",), broken=BOTH),
    Model("tree", "chain", "average", ("CHAIN",), {"chunks": 1}, FLUSH),
    Model("tree", "chain", "reduce", ("CHAIN", "REDUCE"), {"chunks": 1}, BOTH),
    Model("tree", "chain", "broadcast", ("CHAIN", "BROADCAST"), {"chunks": 1}, BOTH),
    Model("tree", "tree", "average", ("N=4",), size=4),
    Model("pipeline", "chain", options=TWO_CHUNKS, broken={**FLUSH, "NO_RESULT": no_result}),
    Model("ring", "ring", broken=FLUSH),
    Model("ring", "ring", "reduce-scatter", ("ONE_WAY",), broken=BOTH),
    Model("halving_doubling", "halving-doubling", broken=FLUSH),
    Model("halving_doubling", "halving-doubling", "reduce-scatter", ("ONE_WAY",), broken=BOTH),
    Model("direct", "gdraa-direct", broken={"NO_READY": no_ready, "NO_DONE": no_done}),
    Model(
        "nodes",
        "gdraa-nodes",
        options={"group_size": 2},
        broken={**FLUSH, "NO_DONE": no_mate},
        size=4,
        count=64,
    ),
    Model("staged", "staged", options={"piece": 48}, broken={"ONE_PHASE": one_phase}),
    Model(
        "staged",
        "staged",
        defines=("OWNERS",),
        options={"piece": 48, "owners": 1},
        broken={"NO_DONE": no_reduced},
    ),
    Model("stages", "multi-stage", "broadcast", (), {"stages": 2, "ahead": 1}, BOTH),
    Model("all_to_all", "all-to-all", "all-to-all", broken=BOTH),
]
CASES = [(model, None) for model in NAMED] + [
    (model, how) for model in NAMED for how in model.broken
]

needs_spin = pytest.mark.skipif(
    not (shutil.which("spin") and shutil.which("gcc")),
    reason="spin or gcc is not installed: apt-get install spin gcc",
)


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@needs_spin
@pytest.mark.parametrize(
    ("model", "how"), full(CASES, quick=1), ids=lambda case: str(case or "whole")
)
def test_spin_and_the_checker_agree(model: Model, how: str | None, tmp_path: Path) -> None:
    defines = [f"-D{name}" for name in (*model.defines, *([how] if how else []))]
    run(tmp_path, "spin", "-a", *defines, str(MODELS / f"{model.name}.pml"))
    optimised = "-O2" if how is None else "-O0"  # an error is found at once
    flags = ("-w", "-DSAFETY", "-DCOLLAPSE", "-DVECTORSZ=2048")
    run(tmp_path, "gcc", optimised, *flags, "-o", "pan", "pan.c")
    said = run(tmp_path, "./pan", "-m100000", "-w22")
    assert "max search depth too small" not in said
    found = re.search(r"errors: (\d+)", said)
    assert found is not None, said
    assert (int(found.group(1)) > 0) == (how is not None), said
    if how is not None:
        assert "assertion violated" in said or "invalid end state" in said

    phases = model.phases() if how is None else model.broken[how](model.phases())
    findings = happens_before(phases) + symbolic_run(phases, model.kind, layers=1)
    assert bool(findings) == (how is not None), findings


def test_every_plan_is_of_a_modelled_protocol() -> None:
    """The plans without a model are trees too, of other shapes."""
    modelled = {model.plan for model in NAMED}
    assert OWN - modelled == {"kary", "chain-chain", "chain-binomial"}
    assert {PLANS[name].kinds for name in OWN - modelled} == {PLANS["chain"].kinds}
