"""Selection of a plan where the caller names none: by the policy, else by size and mapping.

All inputs are the same on all ranks: the policy (compared at init), the world, the size.
"""

from __future__ import annotations

from collections.abc import Sequence

from pgasdl.collectives.policy import Choice, Policy, operation_of
from pgasdl.errors import PlanError
from pgasdl.group import Group
from pgasdl.plans import PLANS, spec_of
from pgasdl.plans.algorithms.blocks import ALIGN
from pgasdl.plans.plan import ROOTED

# Estimates for RDMA adapters, for the rules where memory is not mapped: seconds that a message
# takes, and seconds that it occupies its sender. `pgasdl tune` measures them.
_LATENCY, _STARTUP = 1.5e-6, 0.3e-6
# S-Caffe section 5: chains are best above this many bytes, and up to this many ranks.
_CHAIN_BYTES, _CHAIN_RANKS = 8 << 20, 8
# Two ranks send as much by one-shot as by gdraa, in half as many messages; with more bytes the
# Reduce, which is twice as long, costs more than a latency. Measured over MPI.
_ONE_SHOT_BYTES = 16 << 10
# Where ranks share cores, and from so many bytes on, one copy by the kernel is about as fast as two
# through a mapped workspace: 0.8 to 1.3 of its time with 64 MB, but 1.3 to 1.8 with 16 MB (4 and 8
# ranks on 2 cores of an EPYC; on another 0.76 and 0.9).
# With a core each the kernel's copy took 2 to 4 times as long on an EPYC; on a Xeon 0.9 (4 MB in
# large pages) to 2 times.
_READ_BYTES = 64 << 20


def select(
    policy: Policy,
    group: Group,
    kind: str,
    nbytes: int,
    *,
    in_place: bool,
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
    readable : bool, default False
        It lies elsewhere, and every rank can read every other's.
    wire : bool, default False
        The array travels in another dtype.
    shares : bool, default False
        It takes turns with other arrays on one inbox; not every plan allows that.
    phases : bool, default True
        Its executions may alternate between phases; a policy may name such a plan all the same.
    """
    operation = operation_of(kind)
    names = (operation,) if in_place else (f"{operation}-array", operation)
    for name in names:
        choice = policy.find(name, nbytes)
        # A policy may name a plan that this array cannot use, such as one that needs mapped
        # memory.
        if choice is None or (shares and not PLANS[choice.plan].shares):
            continue
        if able(group, choice.plan, kind, in_place=in_place, readable=readable, wire=wire):
            return choice
    return automatic(
        group, kind, nbytes, in_place=in_place, readable=readable, wire=wire, phases=phases
    )


def select_candidates(
    policy: Policy, group: Group, kind: str, nbytes: int, plans: Sequence[str], *, wire: bool
) -> list[Choice]:
    """Return the plans of a bucket: those that were asked for, or the selected one.

    Raises
    ------
    PlanError
        No such plan, or it cannot run here.
    """
    if not plans:
        return [select(policy, group, kind, nbytes, in_place=True, wire=wire, phases=False)]
    for plan in plans:
        if spec_of(plan).mapped and not group.mapped:
            raise PlanError(
                f"plan {plan} loads and stores peers' memory, which is not mapped here: use "
                "gdraa or tree"
            )
        if len(plans) > 1 and not able(group, plan, kind, in_place=True, wire=wire):
            raise PlanError(f"plan {plan} is no candidate for kind {kind!r} here")
    return [Choice(plan) for plan in plans]


def able(
    group: Group,
    plan: str,
    kind: str,
    *,
    in_place: bool,
    readable: bool = False,
    wire: bool = False,
) -> bool:
    """Whether a plan can serve such an array here."""
    spec = PLANS[plan]
    if kind not in spec.kinds or (wire and not spec.wire):
        return False
    if spec.mapped and not group.mapped:
        return False
    if spec.reads:
        return readable
    if spec.inbox_pieces and (spec.mapped or not in_place):
        return not in_place and works_on_any(group, plan)
    return in_place or not spec.mapped


def works_on_any(group: Group, plan: str) -> bool:
    """Whether a plan works on arrays wherever they lie, without a copy in a segment."""
    spec = PLANS[plan]
    if spec.inbox_pieces and not spec.mapped:
        return not group.mapped and not group.topology.registers(group.ranks)
    return spec.inbox_pieces > 0 or spec.reads


def automatic(
    group: Group,
    kind: str,
    nbytes: int,
    *,
    in_place: bool,
    readable: bool = False,
    wire: bool,
    phases: bool = True,
) -> Choice:
    """Return the plan where no policy names one."""
    if kind == "all-to-all":
        return Choice("all-to-all")
    if kind in ROOTED:
        short = nbytes < _CHAIN_BYTES or group.size <= 2
        chain = "chain" if group.size <= _CHAIN_RANKS else "chain-binomial"
        return Choice("tree" if short else chain)
    for plan in ("gdraa-direct", "gdraa-read", "staged"):
        if PLANS[plan].reads and not (group.topology.oversubscribed and nbytes >= _READ_BYTES):
            continue
        if able(group, plan, kind, in_place=in_place, readable=readable, wire=wire):
            return Choice(plan)
    few = group.size == 2 and nbytes <= _ONE_SHOT_BYTES and works_on_any(group, "one-shot")
    if few and phases and able(group, "one-shot", kind, in_place=in_place, wire=wire):
        return Choice("one-shot")
    # Blocks are whole cache lines: few elements have few owners.
    owners = min(group.size, -(-nbytes // (4 * ALIGN)))
    rounds = (group.size - 1).bit_length()
    to_all = 2 * _LATENCY + (owners + group.size) * _STARTUP
    in_halves = 2 * rounds * (_LATENCY + _STARTUP)
    if to_all > in_halves and group.size > 4:
        return Choice("halving-doubling")
    private = not in_place and able(group, "gdraa-private", kind, in_place=False, wire=wire)
    return Choice("gdraa-private" if private else "gdraa")
