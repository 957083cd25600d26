"""Selection of a plan where the caller names none: by the policy, else by size, mapping and nodes.

All inputs are the same on all ranks: the policy (compared at init), the world, the size.
"""

from __future__ import annotations

from collections.abc import Sequence

from pgasdl.collectives.policy import Choice, Policy, operation_of
from pgasdl.errors import PlanError
from pgasdl.group import Group
from pgasdl.plans import PLANS, Case, Members, spec_of


def select(
    policy: Policy,
    group: Group,
    kind: str,
    nbytes: int,
    *,
    in_place: bool,
    on_gpu: bool = False,
    readable: bool = False,
    wire: bool = False,
    shares: bool = False,
    phases: bool = True,
) -> Choice:
    """Return the plan for an array, and its options.

    Parameters
    ----------
    kind : str
        One of :data:`pgasdl.plans.KINDS`.
    in_place : bool
        The array lies in a segment on every rank.
    on_gpu : bool, default False
        It lies on a GPU.
    readable : bool, default False
        It lies elsewhere, and every rank can read every other's.
    wire : bool, default False
        The array travels in another dtype.
    shares : bool, default False
        It takes turns with other arrays on one inbox; not every plan allows that.
    phases : bool, default True
        Its executions may alternate between phases; a policy may name such a plan all the same.
    """
    case = Case(group.members, kind, nbytes, in_place, readable, wire, on_gpu)
    operation = operation_of(kind)
    names = (operation,) if in_place else (f"{operation}-array", operation)
    for name in names:
        choice = policy.find(name, nbytes)
        # A policy may name a plan that this array cannot use, such as one that needs mapped
        # memory.
        if choice is None or (shares and not PLANS[choice.plan].shares):
            continue
        if able(choice.plan, case):
            return choice
    return automatic(case, shares=shares, phases=phases)


def select_candidates(
    policy: Policy,
    group: Group,
    kind: str,
    nbytes: int,
    plans: Sequence[str],
    *,
    wire: bool,
    on_gpu: bool,
) -> list[Choice]:
    """Return the plans of a bucket: those that were asked for, or the selected one.

    Raises
    ------
    PlanError
        No such plan, or it cannot run here.
    """
    if not plans:
        how = {"on_gpu": on_gpu, "wire": wire, "phases": False}
        return [select(policy, group, kind, nbytes, in_place=True, **how)]
    for plan in plans:
        if spec_of(plan).mapped and not group.mapped:
            raise PlanError(
                f"plan {plan} loads and stores peers' memory, which is not mapped here: use "
                "gdraa or tree"
            )
        case = Case(group.members, kind, nbytes, in_segments=True, wire=wire, on_gpu=on_gpu)
        if len(plans) > 1 and not able(plan, case):
            raise PlanError(f"plan {plan} is no candidate for kind {kind!r} here")
    return [Choice(plan) for plan in plans]


def able(plan: str, case: Case) -> bool:
    """Whether a plan can serve such an array here."""
    spec = PLANS[plan]
    if case.kind not in spec.kinds or (case.wire and not spec.wire):
        return False
    if spec.mapped and not case.members.mapped:
        return False
    if spec.works_on == "private":
        if case.in_segments:
            return not case.on_gpu
        return works_anywhere(plan, case.members)
    where = {"segment": True, "mapped": case.in_segments, "readable": case.readable}
    return where[spec.works_on]


def works_anywhere(plan: str, members: Members) -> bool:
    """Whether a plan works on arrays wherever they lie, without a copy in a segment."""
    spec = PLANS[plan]
    if spec.works_on == "private" and not spec.mapped:
        return not members.mapped and not members.registers
    return spec.works_on in ("private", "readable")


def automatic(
    case: Case, *, shares: bool = False, phases: bool = True, by_element: bool = False
) -> Choice:
    """Return the plan where no policy names one: the first of the table that can serve and suits.

    Parameters
    ----------
    shares, phases : bool
        As for :func:`select`.
    by_element : bool, default False
        The array goes in pieces, which must leave its bits as they are.

    Raises
    ------
    PlanError
        None does.
    """
    for name, spec in PLANS.items():
        if (shares and not spec.shares) or (not phases and spec.phases > 1):
            continue
        if by_element and not spec.by_element:
            continue
        if able(name, case) and spec.suits(case):
            return Choice(name, tuple(sorted(spec.tuned(case).items())))
    raise PlanError(f"no plan of the table suits kind {case.kind!r} here: name one")
