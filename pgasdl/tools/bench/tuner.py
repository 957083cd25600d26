"""The tuner: predicts every plan's time, measures the best ones, keeps the fastest by size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pgasdl.collectives.bound import able, automatic, options_for, works_anywhere
from pgasdl.collectives.policy import Choice, Policy, Rule
from pgasdl.context import Context
from pgasdl.plans import PLANS, Case, build_all
from pgasdl.plans.algorithms import staged
from pgasdl.plans.cost import predict
from pgasdl.tools.bench.calibrate import Calibration
from pgasdl.tools.bench.ours import Ours
from pgasdl.tools.bench.session import Session

# Values of options to try, one at a time, besides a plan's defaults.
TRIED = {"chunks": (1, 8), "chain_size": (4, 16), "stages": (1, 16)}
# Candidates are predicted within this factor of the best; at least and at most so many.
NEAR, FEWEST, MOST = 2.5, 3, 12
# Plans within this factor of the fastest are measured again, so many times as long.
CLOSE, AGAIN = 1.35, 3
# A neighbour's choice is kept if it is slower by at most this factor: fewer rules, less noise.
TOLERANCE = 1.03
# Where ranks share cores, times say more about the scheduler than about plans: there the automatic
# choice is kept if it is slower by at most this factor.
CROWDED_TOLERANCE = 1.25
Figures = dict[Choice, float]


class Operation(NamedTuple):
    """An operation of a policy: the kind of plan that is measured for it, and where arrays lie."""

    name: str
    kind: str = "average"
    in_segment: bool = True


ALLREDUCE, ARRAYS = Operation("allreduce"), Operation("allreduce-array", in_segment=False)
ROOTED = Operation("reduce", "reduce"), Operation("broadcast", "broadcast")
TUNED = ALLREDUCE, ARRAYS, *ROOTED


@dataclass(slots=True)
class Size:
    """The microseconds of one size, by choice."""

    nbytes: int
    predicted: Figures = field(default_factory=dict)
    measured: Figures = field(default_factory=dict)
    usual: Choice | None = None  # kept unless another is clearly faster
    operation: str = ALLREDUCE.name

    def __str__(self) -> str:
        ranked = sorted(self.measured.items(), key=lambda item: item[1])
        plans = [f"{choice} {us:.1f} ({self.predicted[choice]:.1f})" for choice, us in ranked]
        return f"{self.operation:<15} {self.nbytes:>10} bytes: {', '.join(plans)}"


def choices_here(context: Context, kind: str = "average") -> list[Choice]:
    """List every plan that has a kind here, in segments."""
    found = []
    members = context.world.members
    case = Case(members, kind, 0, in_segments=True)
    for name, spec in PLANS.items():
        if not able(name, case):
            continue
        if "group_size" in spec.options_of(members, 1) and not members.several_nodes:
            continue  # without nodes it is gdraa
        found.append(Choice(name))
        found += [
            Choice(name, ((option, value),))
            for option, values in TRIED.items()
            if option in spec.options
            for value in values
            if option != "chain_size" or value < context.size
        ]
        if tuned := spec.tuned(case):
            found.append(Choice(name, tuple(sorted(tuned.items()))))
    return found


def choices_of_arrays(context: Context) -> list[Choice]:
    """List every plan that exchanges gradients here where they lie, outside segments.

    Empty where every array has to be copied into a segment: then the rules of segments apply.
    """
    found: list[Choice] = []
    members = context.world.members
    case = Case(members, "average", 0, in_segments=False)
    for name, spec in PLANS.items():
        if works_anywhere(name, members) and able(name, case):
            options = [(("owners", n),) for n in (0, 1)] if "owners" in spec.options else [()]
            found += [Choice(name, each) for each in options]
    return found


def predict_all(
    context: Context,
    calibration: Calibration,
    choices: Sequence[Choice],
    nbytes: int,
    kind: str = "average",
) -> Figures:
    """Predict the microseconds of each choice."""
    model = calibration.model(nbytes)
    found = {}
    for choice in choices:
        here = options_for(context.world, choice.plan, "float32", nbytes // 4)
        extra = {**here, **dict(choice.options)}
        plans = build_all(choice.plan, context.size, nbytes // 4, kind=kind, **extra)
        found[choice] = 1e6 * float(predict(plans, model))
    return found


def measure_all(
    session: Session, choices: Sequence[Choice], nbytes: int, operation: Operation = ALLREDUCE
) -> Figures:
    """Measure the microseconds of each choice, in turns, on one array; the same on every rank.

    They are lower quartiles, which other work on the machine hardly moves. Choices that may be the
    fastest, but for noise, are measured once more, for longer.
    """
    ours = Ours(session)

    def measure(some: Sequence[Choice], longer: int) -> Figures:
        contenders, free = ours.handles(
            nbytes // 4, some, operation.kind, in_segment=operation.in_segment
        )
        session.take_turns(contenders, longer=longer)
        times = session.ranks.latest(np.array([one.samples().quartile for one in contenders]))
        free()
        return {choice: float(time) for choice, time in zip(some, times, strict=True)}

    figures = measure(choices, 1)
    limit = CLOSE * min(figures.values())
    close = [choice for choice, us in figures.items() if us <= limit]
    return figures | (measure(close, AGAIN) if len(close) > 1 else {})


def near(predicted: Figures) -> list[Choice]:
    """List the choices to measure, the best prediction first."""
    ranked = sorted(predicted, key=lambda choice: (predicted[choice], str(choice)))
    limit = NEAR * predicted[ranked[0]]
    close = [choice for choice in ranked if predicted[choice] <= limit]
    return ranked[: min(MOST, max(FEWEST, len(close)))]


def tune(
    session: Session,
    calibration: Calibration,
    sizes: Sequence[int],
    report: Callable[[Size], None],
    operations: Sequence[Operation] = TUNED,
) -> tuple[Policy, list[Size]]:
    """Measure candidates at each size; the policy is the same on every rank.

    ``report`` is called with each size of each operation, as soon as it was measured.
    """
    found = []
    rules = []
    for operation in operations:
        measured = _tune(session, calibration, sizes, report, operation)
        if measured:
            rules.append((operation.name, rules_of(measured)))
        found += measured
    return Policy(tuple(rules)), found


def _tune(
    session: Session,
    calibration: Calibration,
    sizes: Sequence[int],
    report: Callable[[Size], None],
    operation: Operation,
) -> list[Size]:
    """Measure the candidates of one operation at each size; there may be none."""
    context, (name, kind, in_segment) = session.context, operation
    choices = choices_here(context, kind) if in_segment else choices_of_arrays(context)
    found: list[Size] = []
    for nbytes in sizes if choices else ():
        predicted = predict_all(context, calibration, choices, nbytes, kind)
        size = Size(nbytes, predicted, operation=name)
        usual = usual_choice(context, nbytes, operation)
        candidates = near(size.predicted) if in_segment else list(choices)
        if usual not in candidates:
            candidates.append(usual)
            size.predicted |= predict_all(context, calibration, [usual], nbytes, kind)
        size.measured = measure_all(session, candidates, nbytes, operation)
        if context.topology.oversubscribed:
            size.usual = usual
        found.append(size)
        report(size)
    return found


def usual_choice(context: Context, nbytes: int, operation: Operation) -> Choice:
    """Return the choice without a policy, with its option ``owners`` if it has one."""
    world = context.world
    usual = automatic(Case(world.members, operation.kind, nbytes, operation.in_segment))
    if "owners" in PLANS[usual.plan].options:
        return Choice(usual.plan, (("owners", staged.owners_of(world.size, nbytes // 4)),))
    return usual


def rules_of(sizes: Sequence[Size]) -> tuple[Rule, ...]:
    """Make an operation's rules: they change at the geometric means of neighbouring sizes."""
    picks: list[Choice] = []
    for size in sizes:
        best = min(size.measured, key=size.measured.__getitem__)
        if size.usual is not None:
            limit = CROWDED_TOLERANCE * size.measured[best]
            best = size.usual if size.measured[size.usual] <= limit else best
        before = picks[-1] if picks else best
        keeps = size.measured.get(before, math.inf) <= TOLERANCE * size.measured[best]
        picks.append(before if keeps else best)
    rules: list[Rule] = []
    low = 0
    for at, pick in enumerate(picks):
        last = at + 1 == len(picks)
        if not last and picks[at + 1] == pick:
            continue
        high = math.inf
        if not last:
            high = float(_round(math.sqrt(sizes[at].nbytes * sizes[at + 1].nbytes)))
        rules.append(Rule(low, high, pick))
        low = 0 if last else int(high)
    return tuple(rules)


def _round(nbytes: float) -> int:
    """Round to a power of two, which prints short."""
    return 1 << round(math.log2(nbytes))
