"""The table of plans: adds rows, and builds plans by name."""

from __future__ import annotations

from numbers import Integral

from pgasdl.errors import PlanError
from pgasdl.plans.algorithms import (
    all_to_all,
    gdraa,
    gdraa_direct,
    gdraa_nodes,
    gdraa_private,
    halving_doubling,
    multi_stage,
    one_shot,
    ring,
    staged,
    trees,
)
from pgasdl.plans.plan import EXCHANGES, KINDS, PLACES, Plan, PlanSpec, Sizes
from pgasdl.plans.validation import validate

# Where nobody names a plan, the first row in this order that can serve and suits is taken.
PLANS: dict[str, PlanSpec] = {
    spec.name: spec
    for spec in (
        staged.SPEC,
        gdraa_direct.SPEC,
        one_shot.SPEC,
        halving_doubling.SPEC,
        gdraa_nodes.SPEC,
        gdraa_private.SPEC,
        gdraa.SPEC,
        ring.SPEC,
        *trees.SPECS,
        multi_stage.SPEC,
        all_to_all.SPEC,
    )
}
OWN = frozenset(PLANS)  # those of this package; others are registered


def register(spec: PlanSpec) -> None:
    """Add a row to the table of plans.

    Raises
    ------
    PlanError
        The name is taken, or the row has an unknown kind, no phase, or nowhere to work.
    """
    if spec.name in PLANS:
        raise PlanError(f"a plan named {spec.name!r} is registered already")
    unknown = [kind for kind in spec.kinds if kind not in KINDS]
    if not spec.name or not spec.kinds or unknown:
        raise PlanError(f"plan {spec.name!r}: kinds {spec.kinds!r} are not among {KINDS}")
    if spec.works_on not in PLACES:
        raise PlanError(f"plan {spec.name!r}: works_on {spec.works_on!r} is not among {PLACES}")
    if spec.works_on == "mapped" and not spec.mapped:
        raise PlanError(f"plan {spec.name!r}: works_on 'mapped' goes with mapped=True")
    if (spec.works_on == "private") != (spec.inbox_pieces > 0):
        raise PlanError(f"plan {spec.name!r}: inbox_pieces goes with works_on 'private' alone")
    if spec.works_on == "private" and spec.longest is None:
        raise PlanError(f"plan {spec.name!r}: works_on 'private' needs longest")
    if spec.phases < 1:
        raise PlanError(f"plan {spec.name!r}: {spec.phases} phases")
    PLANS[spec.name] = spec


def spec_of(name: str) -> PlanSpec:
    """Return the row of a plan; PlanError: no such plan."""
    spec = PLANS.get(name)
    if spec is None:
        raise PlanError(f"no plan named {name!r}; there are {', '.join(sorted(PLANS))}")
    return spec


def build(
    name: str,
    rank: int,
    size: int,
    count: int,
    *,
    kind: str = "average",
    wire: bool = False,
    **options: Sizes,
) -> Plan:
    """Build one rank's plan and validate it.

    Parameters
    ----------
    name : str
        A key of :data:`PLANS`.
    rank, size : int
        0 <= rank < size.
    count : int
        Elements, 0 <= count; with 0 the plan has no steps.
    kind : str, default "average"
        One of :data:`KINDS`, as :func:`pgasdl.plans.checker.results.regions` defines them:
        ``average``, ``sum``, ``update`` (owners update weights with the mean gradient) ...
    wire : bool, default False
        Send gradients in another dtype, through the buffers ``wire_out`` and ``wire_in``.
    **options : Sizes
        Options of the plan, such as ``root`` of ``tree``; and ``phase``, 0 <= phase < phases, for
        plans with phases.

    Raises
    ------
    PlanError
        Names the wrong argument, and what is possible.
    """
    spec = spec_of(name)
    if size < 1 or not 0 <= rank < size:
        raise PlanError(f"plan {name}: rank {rank} is not one of {size} ranks")
    if count < 0:
        raise PlanError(f"plan {name}: count is {count}")
    if kind not in spec.kinds:
        raise PlanError(f"plan {name}: no kind {kind!r}; there are {', '.join(spec.kinds)}")
    if wire and not spec.wire:
        raise PlanError(f"plan {name}: has no wire precision")
    if wire and kind not in EXCHANGES:
        raise PlanError(f"plan {name}: wire precision is for {', '.join(EXCHANGES)}, not {kind}")
    options_of_spec = (*spec.options, "phase") if spec.phases > 1 else spec.options
    for option, value in options.items():
        if option not in options_of_spec:
            known = ", ".join(options_of_spec) or "none"
            raise PlanError(f"plan {name}: no option {option!r}; there are: {known}")
        several = option in spec.several
        each = value if several and isinstance(value, tuple) else (value,)
        if not all(isinstance(number, Integral) for number in each):
            needed = "an integer, or a tuple of them," if several else "an integer"
            raise PlanError(f"plan {name}: {option} is {value!r}, {needed} is needed")
        if option == "phase" and value not in range(spec.phases):
            raise PlanError(f"plan {name}: phase {value} is not one of {spec.phases}")
    plan = spec.build(rank, size, count, kind=kind, wire=wire, **options)
    validate(plan)
    return plan


def build_all(
    name: str, size: int, count: int, *, kind: str = "average", wire: bool = False, **options: Sizes
) -> list[Plan]:
    """Build the plans of all ranks; parameters as in :func:`build`."""
    return [build(name, rank, size, count, kind=kind, wire=wire, **options) for rank in range(size)]


def build_phases(
    name: str, size: int, count: int, *, kind: str = "average", wire: bool = False, **options: Sizes
) -> list[list[Plan]]:
    """Build the plans of all ranks for every phase; parameters as in :func:`build`."""
    phases = PLANS[name].phases if name in PLANS else 1
    each = [{**options, "phase": phase} for phase in range(phases)] if phases > 1 else [options]
    return [build_all(name, size, count, kind=kind, wire=wire, **chosen) for chosen in each]
