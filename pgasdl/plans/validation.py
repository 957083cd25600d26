"""The rules of a well-formed plan, alone and beside those of the other ranks and phases."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pgasdl.errors import PlanError
from pgasdl.plans.plan import (
    APPLICATION_BUFFERS,
    HOOKS,
    Call,
    Copy,
    Flush,
    Plan,
    Put,
    Reduce,
    Span,
    Step,
    Wait,
    is_wire,
    span_text,
)


def validate(plan: Plan) -> None:
    """Refuse faults that one rank's plan shows by itself.

    Raises
    ------
    PlanError
        Naming plan, rank, lane, step and the fault.
    """
    _check_header(plan)
    raised: set[tuple[int, int]] = set()
    awaited: set[int] = set()
    for lane, index, step in plan.steps():
        fault = next(_faults(plan, step), None)
        if fault is None and isinstance(step, Put) and step.notify is not None:
            if (step.peer, step.notify) in raised:
                fault = f"raises notification {step.notify} of rank {step.peer} again"
            raised.add((step.peer, step.notify))
        if fault is None and isinstance(step, Wait):
            if step.notification in awaited:
                fault = f"waits for notification {step.notification} again"
            awaited.add(step.notification)
        if fault is not None:
            raise PlanError(f"{plan.where(lane, index)}: {fault}")


def validate_all(plans: Sequence[Plan]) -> None:
    """Validate every rank's plan, and check that they match.

    All must agree on name, size, count, buffers, notifications and mapping, and each raised
    notification must be waited for exactly once by the rank it is raised at.

    Raises
    ------
    PlanError
        Naming plan, rank, lane, step and the fault.
    """
    if not plans:
        raise PlanError("no plans: there must be one for every rank")
    model = plans[0]
    if len(plans) != model.size:
        raise PlanError(f"plan {model.name}: {len(plans)} plans for {model.size} ranks")
    for rank, plan in enumerate(plans):
        if plan.rank != rank:
            raise PlanError(f"plan {plan.name}: place {rank} holds the plan of rank {plan.rank}")
        _check_alike(plan, model, "rank 0")
        validate(plan)
    _check_notifications(plans)


def validate_phases(phases: Sequence[Sequence[Plan]]) -> None:
    """Validate every rank's plan of every phase, and check that the phases match.

    Raises
    ------
    PlanError
        Naming plan, rank, lane, step and the fault.
    """
    if not phases:
        raise PlanError("no plans: there must be one for every rank")
    for plans in phases:
        validate_all(plans)
        _check_alike(plans[0], phases[0][0], "phase 0")


def _check_alike(plan: Plan, model: Plan, whose: str) -> None:
    for what in ("name", "size", "count", "private", "buffers", "notifications", "mapped"):
        mine, first = getattr(plan, what), getattr(model, what)
        if what == "buffers":  # in their order, since they are known by number
            mine, first = (
                [(name, -1 if name in of.private else n) for name, n in of.buffers.items()]
                for of in (plan, model)
            )
        if mine != first:
            raise PlanError(
                f"plan {plan.name}, rank {plan.rank}: {what} is {mine!r}, but {whose} has {first!r}"
            )


def _check_notifications(plans: Sequence[Plan]) -> None:
    # (rank of the board, notification) -> (plan, lane, step)
    raised: dict[tuple[int, int], tuple[Plan, int, int]] = {}
    awaited: dict[tuple[int, int], tuple[Plan, int, int]] = {}
    owed: dict[tuple[int, int], int | None] = {}
    for plan in plans:
        for lane, index, step in plan.steps():
            if isinstance(step, Put) and step.notify is not None:
                first = raised.setdefault((step.peer, step.notify), (plan, lane, index))
                if first[0] is not plan:
                    raise PlanError(
                        f"{plan.where(lane, index)}: notification {step.notify} of rank "
                        f"{step.peer} is also raised by {first[0].where(*first[1:])}"
                    )
            elif isinstance(step, Wait):
                awaited[(plan.rank, step.notification)] = (plan, lane, index)
                owed[(plan.rank, step.notification)] = step.peer
    for (rank, notification), (plan, lane, index) in awaited.items():
        if (rank, notification) not in raised:
            text = f"nobody raises notification {notification} here"
            raise PlanError(f"{plan.where(lane, index)}: {text}")
        raiser = raised[(rank, notification)][0].rank
        if owed[(rank, notification)] not in (None, raiser):
            text = f"rank {raiser} raises notification {notification} here, not the one named"
            raise PlanError(f"{plan.where(lane, index)}: {text}")
    for (rank, notification), (plan, lane, index) in raised.items():
        if (rank, notification) not in awaited:
            text = f"rank {rank} never waits for notification {notification}"
            raise PlanError(f"{plan.where(lane, index)}: {text}")


def _check_header(plan: Plan) -> None:
    at = f"plan {plan.name}, rank {plan.rank}"
    if not plan.name:
        raise PlanError("a plan needs a name")
    if plan.size < 1 or not 0 <= plan.rank < plan.size:
        raise PlanError(f"{at}: not a rank of {plan.size}")
    if plan.count < 0 or plan.notifications < 0:
        raise PlanError(f"{at}: count {plan.count} or notifications {plan.notifications} below 0")
    for buffer, elements in plan.buffers.items():
        if elements < 0:
            raise PlanError(f"{at}: buffer {buffer} of {elements} elements")
        own = buffer in plan.private
        if buffer in APPLICATION_BUFFERS and elements != plan.count and not own:
            raise PlanError(f"{at}: buffer {buffer} of {elements} elements, not {plan.count}")


def _faults(plan: Plan, step: Step) -> Iterator[str]:
    """Yield the faults of one step; only the first is meaningful."""
    match step:
        case Put():
            yield from _faults_of_put(plan, step)
        case Wait(notification):
            yield from _faults_of_notification(plan, notification)
        case Reduce():
            yield from _faults_of_reduce(plan, step)
        case Copy():
            yield from _faults_of_copy(plan, step)
        case Call(hook, span, n):
            if hook not in HOOKS:
                yield f"no hook named {hook!r}, only {', '.join(sorted(HOOKS))}"
            if n < 1:
                yield f"n is {n}: nothing to do"
            if span.buffer != "data" or "weights" not in plan.buffers:
                yield "an update needs a span of data, and weights beside it"
            yield from _faults_of_span(plan, span, n, local=True)
        case Flush():
            pass
        case _:
            yield f"{step!r} is no step"


def _faults_of_put(plan: Plan, put: Put) -> Iterator[str]:
    if not 0 <= put.peer < plan.size:
        yield f"peer {put.peer} is not one of {plan.size} ranks"
    if put.peer == plan.rank:
        yield "a Put to itself; a Reduce copies"
    if put.n < 0:
        yield f"n is {put.n}"
    if put.n == 0 and put.notify is None:
        yield "n is 0 and there is no flag: nothing to do"
    if put.dst.rank is not None:
        yield "dst names a rank; peer alone says whose copy it is"
    if is_wire(put.src.buffer) != is_wire(put.dst.buffer):
        yield "a Put moves bytes, but only one side is in the wire's dtype"
    if put.notify is not None:
        yield from _faults_of_notification(plan, put.notify)
    yield from _faults_of_span(plan, put.src, put.n, local=True)
    yield from _faults_of_span(plan, put.dst, put.n, local=True)
    if put.n and put.dst.buffer in plan.private:
        yield f"{span_text(put.dst, put.n)} is private to its rank"


def _faults_of_notification(plan: Plan, notification: int) -> Iterator[str]:
    if not 0 <= notification < plan.notifications:
        yield f"notification {notification} is not below {plan.notifications}"


def _faults_of_reduce(plan: Plan, step: Reduce) -> Iterator[str]:
    if step.n < 1:
        yield f"n is {step.n}: nothing to do"
    if not step.dsts or not step.srcs:
        yield "needs a destination and a source"
    if not math.isfinite(step.scale):
        yield f"scale is {step.scale}"
    for span in (*step.dsts, *step.srcs):
        yield from _faults_of_span(plan, span, step.n, local=not plan.mapped)
    for place, dst in enumerate(step.dsts):
        for other in step.dsts[:place]:
            if _overlap(dst, other, step.n):
                both = f"{span_text(other, step.n)} and {span_text(dst, step.n)}"
                yield f"destinations {both} overlap"
        for src in step.srcs:
            if src != dst and _overlap(dst, src, step.n):
                yield f"{span_text(dst, step.n)} overlaps the source {span_text(src, step.n)}"


def _faults_of_copy(plan: Plan, step: Copy) -> Iterator[str]:
    if step.n < 1 or step.rows < 1:
        yield f"{step.rows} rows of {step.n} elements: nothing to do"
    if step.dst.buffer == step.src.buffer:
        yield "rows are copied between two buffers"
    if step.rows > 1 and min(step.dst_step, step.src_step) < step.n:
        yield f"rows of {step.n} elements, {step.dst_step} and {step.src_step} apart, overlap"
    for span, apart in ((step.dst, step.dst_step), (step.src, step.src_step)):
        whole = (step.rows - 1) * apart + step.n
        yield from _faults_of_span(plan, span, whole, local=not plan.mapped)


def _faults_of_span(plan: Plan, span: Span, n: int, *, local: bool) -> Iterator[str]:
    elements = plan.buffers.get(span.buffer, -1)
    if elements < 0:
        yield f"no buffer named {span.buffer!r}"
    if span.offset < 0 or span.offset + n > elements:
        yield f"{span_text(span, n)} leaves its buffer of {elements} elements"
    if span.rank is not None:
        if span.buffer in plan.private:
            yield f"{span_text(span, n)} is private to its rank"
        if not 0 <= span.rank < plan.size:
            yield f"{span_text(span, n)}: not one of {plan.size} ranks"
        if span.rank == plan.rank:
            yield f"{span_text(span, n)}: a plan's own copy carries no rank"
        if local:
            yield f"{span_text(span, n)} is remote, which takes a Reduce in a mapped plan"


def _overlap(a: Span, b: Span, n: int) -> bool:
    return a.buffer == b.buffer and a.rank == b.rank and abs(a.offset - b.offset) < n
