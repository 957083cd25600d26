"""Plans to check, and ways to break them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pgasdl.plans import EXCHANGES, PLANS, Plan, Put, Reduce, Span, Step, Wait

BUILT_IN = ("gdraa", "gdraa-direct", "tree")
VARIANTS = [
    (name, kind, wire)
    for name in BUILT_IN
    for kind in EXCHANGES
    for wire in ((False, True) if PLANS[name].wire else (False,))
]


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


def swaps(plans: list[Plan]) -> Iterator[tuple[str, Step, Step, list[Plan]]]:
    """Every plan with two neighbouring steps swapped."""
    for plan in plans:
        for lane, index, step in plan.steps():
            steps = plan.lanes[lane]
            if index + 1 < len(steps):
                after = steps[index + 1]
                swapped = (*steps[:index], after, step, *steps[index + 2 :])
                mutant = with_steps(plans, plan.rank, lane, swapped)
                yield plan.where(lane, index), step, after, mutant


def alterations(plans: list[Plan]) -> Iterator[tuple[str, list[Plan]]]:
    """Every plan with one field of one step changed."""
    for plan in plans:
        for lane, index, step in plan.steps():
            for what, changed in altered(plan, step):
                text = f"{plan.where(lane, index)}: {what}"
                yield text, with_step(plans, plan.rank, lane, index, changed)


def altered(plan: Plan, step: Step) -> Iterator[tuple[str, Step]]:
    """A step with one field changed, in every way that must not pass."""
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
