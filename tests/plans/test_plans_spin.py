"""Spin models of the base protocols: right as they are, wrong with a credit or flush dropped.

They test the checker. The base protocols are the three proofs that a buffer may be overwritten: the
result of the rank that read it (``gdraa``, ``tree``), a credit (their kinds in one direction), and
two sets of slots in turns (``one_shot``). Spin explores all states of a few ranks; the checker must
reach the same verdict on the plan that the model describes, whole and broken in the same way.
A plan needs no model: the checker covers all interleavings of every plan.
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

from pgasdl.plans import Flush, Plan, Put, Step, Wait, build_phases
from pgasdl.plans.checker.happens_before import happens_before
from pgasdl.plans.checker.symbolic_run import symbolic_run

MODELS = Path(__file__).parent / "spin"
Phases = list[list[Plan]]


def without(phases: Phases, dropped: Callable[[int, Step], bool]) -> Phases:
    """All plans without some of their steps: those that ``dropped`` names, by rank."""

    def kept(plan: Plan) -> Plan:
        lanes = (tuple(s for s in lane if not dropped(plan.rank, s)) for lane in plan.lanes)
        return replace(plan, lanes=tuple(lanes))

    return [[kept(plan) for plan in plans] for plans in phases]


def no_flush(phases: Phases) -> Phases:
    return without(phases, lambda rank, step: isinstance(step, Flush))


def no_credit(phases: Phases) -> Phases:
    """Without the notifications that come without data: neither raised nor waited for."""
    alone = {
        (step.peer, step.notify)
        for plans in phases
        for plan in plans
        for _, _, step in plan.steps()
        if isinstance(step, Put) and step.n == 0
    }

    def concerned(rank: int, step: Step) -> bool:
        if isinstance(step, Put):
            return (step.peer, step.notify) in alone
        return isinstance(step, Wait) and (rank, step.notification) in alone

    return without(phases, concerned)


def no_wait(phases: Phases) -> Phases:
    """GDRAA without waiting for results."""
    size = len(phases[0])
    return without(phases, lambda rank, s: isinstance(s, Wait) and s.notification >= size)


@dataclass(frozen=True)
class Model:
    """A model with the plan that it describes, and ways to break both."""

    name: str
    plan: str
    kind: str = "average"
    defines: tuple[str, ...] = ()
    options: dict[str, int] = field(default_factory=dict, hash=False)
    broken: dict[str, Callable[[Phases], Phases]] = field(default_factory=dict, hash=False)
    size: int = 3

    def __str__(self) -> str:
        return "-".join((self.name, *self.defines))

    def phases(self) -> Phases:
        return build_phases(self.plan, self.size, 48, kind=self.kind, **self.options)


FLUSH = {"NO_FLUSH": no_flush}
BOTH = {**FLUSH, "NO_CREDIT": no_credit}
ANSWER = {**FLUSH, "NO_WAIT": no_wait}
NAMED = [
    Model("gdraa", "gdraa", broken=ANSWER),
    Model("gdraa", "gdraa", "reduce-scatter", ("ONE_WAY",), broken=BOTH),
    Model("gdraa", "gdraa-private", "average", ("PRIVATE",), broken=ANSWER),
    Model("one_shot", "one-shot", broken={**FLUSH, "ONE_PHASE": lambda phases: phases[:1]}),
    Model("tree", "tree", broken=FLUSH),
    Model("tree", "tree", "reduce", ("REDUCE",), broken=BOTH),
    Model("tree", "tree", "broadcast", ("BROADCAST",), broken=BOTH),
    Model("tree", "chain", "average", ("CHAIN",), {"chunks": 1}, FLUSH),
    Model("tree", "chain", "reduce", ("CHAIN", "REDUCE"), {"chunks": 1}, BOTH),
    Model("tree", "chain", "broadcast", ("CHAIN", "BROADCAST"), {"chunks": 1}, BOTH),
    Model("tree", "tree", "average", ("N=4",), size=4),
]
CASES = [(model, how) for model in NAMED for how in (None, *model.broken)]

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
