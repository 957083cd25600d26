"""Plans to check, and ways to break them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pgasdl.plans import (
    EXCHANGES,
    KINDS,
    PLANS,
    Call,
    Flush,
    Plan,
    Put,
    Reduce,
    Span,
    Step,
    Wait,
    build_phases,
)
from pgasdl.plans.check import check
from pgasdl.plans.checker import Finding
from pgasdl.plans.plan import Sizes

# Options that change a plan from what it is by default; -1 is the last rank.
OPTIONS: dict[str, tuple[dict[str, Sizes], ...]] = {
    "gdraa-nodes": (
        {"group_size": 2},
        {"group_size": 3, "direct": 1},
        {"group_size": 4},
        {"group_size": (1, 3, 2)},
    ),
    "tree": ({}, {"root": -1, "chunks": 3}, {"group_size": (1, 3), "root": -1}),
    "kary": ({"root": -1, "arity": 3, "chunks": 2},),
    "chain": ({"chunks": 3}, {"root": -1, "chunks": 1}),
    "chain-chain": ({"chain_size": 2, "chunks": 2}, {"chain_size": 3, "root": -1}),
    "chain-binomial": ({"chain_size": 2, "chunks": 2}, {"chain_size": 3, "root": -1}),
    "halving-doubling": ({}, {"group_size": 3}),
    "multi-stage": ({}, {"ahead": 1, "root": -1, "stages": 3}),
}


@dataclass(frozen=True)
class Variant:
    """A plan with everything that it is built with, except the size and the count."""

    name: str
    kind: str
    wire: bool = False
    options: dict[str, Sizes] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        chosen = [f"{name}={value}" for name, value in self.options.items()]
        return "-".join([self.name, self.kind, *(["wire"] if self.wire else []), *chosen])

    def chosen(self, size: int) -> dict[str, Any]:
        """Options for a job of this size."""
        return {name: size - 1 if n == -1 else n for name, n in self.options.items()}

    def plans(self, size: int, count: int) -> list[Plan]:
        """Every rank's plan, where there is one phase."""
        (plans,) = self.phases(size, count)
        return plans

    def phases(self, size: int, count: int) -> list[list[Plan]]:
        """Every rank's plan, by phase."""
        more: Any = {"kind": self.kind, "wire": self.wire, **self.chosen(size)}
        return build_phases(self.name, size, count, **more)

    def check(self, plans: Any, size: int, **how: Any) -> list[Finding]:
        """The findings that the checker has in plans of this variant."""
        root = self.chosen(size).get("root", 0)
        return check(plans, kind=self.kind, root=root, **how)


def variants() -> Iterator[Variant]:
    """Every plan, of every kind it offers, with options and wire precision; all with one phase."""
    for name, spec in PLANS.items():
        for kind in spec.kinds if spec.phases == 1 else ():
            for options in OPTIONS.get(name, ({},)):
                if kind in EXCHANGES or name != "halving-doubling" or not options:
                    yield Variant(name, kind, options=options)
                if spec.wire and kind in EXCHANGES and not options.get("direct"):
                    yield Variant(name, kind, True, options)


VARIANTS = list(variants())
# Without kind sum, which differs from average only in a factor.
TELLING = [variant for variant in VARIANTS if variant.kind != "sum"]
assert {variant.kind for variant in VARIANTS} == set(KINDS)


def averages_quick(variants: Iterable[Variant]) -> list[Any]:
    """For ``parametrize``: all but averages are marked `full`."""
    return [
        pytest.param(each, marks=() if each.kind == "average" else pytest.mark.full)
        for each in variants
    ]


# The outcomes of all mutants, by how these were made: killed, or equivalent. Reported at the end.
SCORE: Counter[tuple[str, str]] = Counter()


def with_steps(plans: list[Plan], rank: int, lane: int, steps: tuple[Step, ...]) -> list[Plan]:
    """All ranks' plans with one lane of one rank replaced."""
    old = plans[rank]
    lanes = (*old.lanes[:lane], steps, *old.lanes[lane + 1 :])
    return [*plans[:rank], replace(old, lanes=lanes), *plans[rank + 1 :]]


def with_step(plans: list[Plan], rank: int, lane: int, index: int, *steps: Step) -> list[Plan]:
    """All ranks' plans with one step replaced by others, or by none."""
    old = plans[rank].lanes[lane]
    return with_steps(plans, rank, lane, (*old[:index], *steps, *old[index + 1 :]))


def deletions(plans: list[Plan]) -> Iterator[tuple[str, list[Plan]]]:
    """Every plan with one step deleted."""
    for plan in plans:
        for lane, index, _ in plan.steps():
            yield plan.where(lane, index), with_step(plans, plan.rank, lane, index)


def swaps(plans: list[Plan]) -> Iterator[tuple[int, str, Step, Step, list[Plan]]]:
    """Every plan with two neighbouring steps swapped."""
    for plan in plans:
        for lane, index, step in plan.steps():
            steps = plan.lanes[lane]
            if index + 1 < len(steps):
                after = steps[index + 1]
                swapped = (*steps[:index], after, step, *steps[index + 2 :])
                mutant = with_steps(plans, plan.rank, lane, swapped)
                yield plan.rank, plan.where(lane, index), step, after, mutant


def alterations(plans: list[Plan]) -> Iterator[tuple[str, list[Plan]]]:
    """Every plan with one field of one step changed."""
    for plan in plans:
        for lane, index, step in plan.steps():
            for what, changed in altered(plan, step):
                text = f"{plan.where(lane, index)}: {what}"
                yield text, with_step(plans, plan.rank, lane, index, changed)


def altered(plan: Plan, step: Step) -> Iterator[tuple[str, Step]]:
    """A step with one field changed, in every way that the checker must refuse."""
    if isinstance(step, Put):
        if step.notify is not None:
            yield "flag lost", replace(step, notify=None)
            for other in range(plan.notifications):
                if other != step.notify:
                    yield f"flag {other}", replace(step, notify=other)
        for peer in range(-1, plan.size + 1):
            if peer != step.peer:
                yield f"to rank {peer}", replace(step, peer=peer)
        if step.n:
            yield "payload lost", replace(step, n=0)
            if step.n > 1:
                yield "last element lost", replace(step, n=step.n - 1)
            for by in (-16, -1, 1, 16):
                yield f"target {by:+}", replace(step, dst=moved(step.dst, by))
                yield f"source {by:+}", replace(step, src=moved(step.src, by))
    elif isinstance(step, Wait):
        for other in range(plan.notifications):
            if other != step.notification:
                yield f"for {other}", Wait(other)
    elif isinstance(step, Reduce):
        yield "scale", replace(step, scale=step.scale * 2)
        if step.n > 1:
            yield "last element lost", replace(step, n=step.n - 1)
        for place, src in enumerate(step.srcs):
            rest = (*step.srcs[:place], *step.srcs[place + 1 :])
            yield f"source {place} dropped", replace(step, srcs=rest)
            yield f"source {place} doubled", replace(step, srcs=(*step.srcs, src))
            yield f"source {place} moved", replace(step, srcs=(*rest, moved(src, 1)))
        for place, dst in enumerate(step.dsts):
            rest = (*step.dsts[:place], *step.dsts[place + 1 :])
            yield f"target {place} dropped", replace(step, dsts=rest)
            yield f"target {place} moved", replace(step, dsts=(*rest, moved(dst, 1)))


def moved(span: Span, by: int) -> Span:
    return replace(span, offset=span.offset + by)


def equivalent(plans: list[Plan], rank: int, first: Step, second: Step) -> str | None:
    """Why a plan may be right with these neighbours swapped; None if their order matters."""
    match first, second:
        case (Wait(), Wait()):
            return "both must have come"
        case (_, Wait()):
            return "waiting earlier is right, unless it is for ever"
        case (Put(), Put()) if first.notify is not None and second.notify is not None:
            return "each has its own flag"
        case (Put(), Reduce() | Call()) if not overlap(written(second), [(first.src, first.n)]):
            return "what is sent stays as it is"
        case (Reduce() | Call(), Put()) if not overlap(written(first), [(second.src, second.n)]):
            freed = [] if second.n else awaited_by(plans, second)
            if not overlap(touched(first), freed):
                return "what is sent, or given free, is something else"
        case (Wait() | Reduce() | Call(), Flush()):
            return "it sends nothing that would have to be flushed"
        case (Flush(), Reduce() | Call()):
            sent = [(s.src, s.n) for _, _, s in plans[rank].steps() if isinstance(s, Put)]
            if not overlap(written(second), sent):
                return "it writes to nothing that was sent"
        case (Reduce() | Call(), Reduce() | Call()):
            if not overlap(written(first), touched(second)) and not overlap(
                written(second), touched(first)
            ):
                return "they touch different elements"
        case (Wait(), _):
            raised = raiser(plans, rank, first.notification)
            if raised.n:
                if not overlap(touched(second), [(raised.dst, raised.n)]):
                    return "what comes is something else"
            elif not (isinstance(second, Put) and second.peer == first.peer):
                return "the credit is for something else"
    return None


Spans = list[tuple[Span, int]]


def written(step: Step) -> Spans:
    """Elements of this rank that a step writes."""
    match step:
        case Reduce(dsts, _, n, _):
            return [(span, n) for span in dsts]
        case Call(_, span, n):
            return [(Span("weights", span.offset), n)]
    return []


def touched(step: Step) -> Spans:
    """Elements of this rank that a step reads or writes."""
    match step:
        case Put(src, n):
            return [(src, n)]
        case Reduce(_, srcs, n, _):
            return [*written(step), *((span, n) for span in srcs)]
        case Call(_, span, n):
            return [*written(step), (span, n)]
    return []


def overlap(some: Spans, others: Spans) -> bool:
    """Whether some of these elements are among the others."""
    return any(
        a.buffer == b.buffer
        and a.rank == b.rank
        and a.offset < b.offset + m
        and b.offset < a.offset + n
        for a, n in some
        for b, m in others
    )


def raiser(plans: list[Plan], rank: int, notification: int) -> Put:
    """The Put that raises a notification."""
    return next(
        step
        for plan in plans
        for _, _, step in plan.steps()
        if isinstance(step, Put) and (step.peer, step.notify) == (rank, notification)
    )


def awaited_by(plans: list[Plan], credit: Put) -> Spans:
    """Where the receiver of a credit writes, after waiting for it."""
    peer = plans[credit.peer]
    giver = next(p.rank for p in plans if any(step is credit for _, _, step in p.steps()))
    return [
        (step.dst, step.n)
        for _, _, step in peer.steps()
        if isinstance(step, Put) and step.peer == giver
    ]
