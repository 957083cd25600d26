"""Checks a plan: symbolic execution of all ranks, several iterations, adversarial delivery.

It has three parts, each of which finds faults by itself:

``validate_phases``
    Each step is well formed, and all ranks' steps match.
``happens_before``
    Order: deadlocks, races and early flags in any interleaving.
``symbolic_run``
    Values: every rank has the result of the kind (``results``), with the same bits, in time.

If they find nothing, the first two prove that no run hangs and that no buffer is overwritten
before it was read, for any number of iterations and of layers in flight. The third proves that
the result is right: without races it is the same in every run. They assume that flags overtake no
earlier write of their lane to the same peer, that a source has been read when a flag or Flush says
so, and that the application leaves ``data`` and ``weights`` alone while a plan runs. They do not
cover arithmetic (rounding, overflow), lost peers, or faults of the executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pgasdl.errors import PlanError
from pgasdl.plans import build_phases
from pgasdl.plans.checker import Finding
from pgasdl.plans.checker.happens_before import happens_before
from pgasdl.plans.checker.results import Region
from pgasdl.plans.checker.symbolic_run import symbolic_run
from pgasdl.plans.plan import KINDS, Plan
from pgasdl.plans.validation import validate_phases

__all__ = ["Finding", "assert_ok", "check"]


def check(
    plans: str | Sequence[Plan] | Sequence[Sequence[Plan]],
    size: int | None = None,
    count: int | None = None,
    *,
    kind: str = "average",
    wire: bool = False,
    iterations: int | None = None,
    layers: int = 2,
    seeds: int = 2,
    results: Sequence[Sequence[Region]] | None = None,
    **options: int,
) -> list[Finding]:
    """Check one plan for all ranks and list what is wrong with it.

    Parameters
    ----------
    plans : str or Sequence[Plan] or Sequence[Sequence[Plan]]
        A registered name, to be built for ``size`` ranks and ``count`` elements; or the plans of
        all ranks, in order of rank; or a list of these, one for each phase.
    kind : str, default "average"
        Kind of the expected result.
    wire, options
        As in :func:`pgasdl.plans.build`. ``root`` also counts for plans that are given: it is the
        root of kinds ``reduce`` and ``broadcast``.
    iterations : int, optional
        Consecutive executions, each of the next phase; None: two of each phase and one more.
    layers : int, default 2
        Instances in flight at once, each on its own buffers, in the schedules that are run.
    seeds : int, default 2
        Schedules to run, besides the proof over all schedules.
    results : Sequence[Sequence[Region]], optional
        The result of each rank, for plans that no kind describes; in the buffer ``result``, if the
        plans have one.

    Returns
    -------
    list[Finding]
        Empty if the plan is right. A malformed plan yields only that finding.
    """
    if kind not in KINDS:
        raise PlanError(f"no kind {kind!r}; there are {', '.join(KINDS)}")
    if isinstance(plans, str):
        if size is None or count is None:
            raise PlanError(f"to check {plans!r} by name takes a size and a count")
        plans = build_phases(plans, size, count, kind=kind, wire=wire, **options)
    phases = _by_phase(plans)
    try:
        validate_phases(phases)
    except PlanError as error:
        everyone = [plan for ranks in phases for plan in ranks]
        rank = next((p.rank for p in everyone if f", rank {p.rank}, " in str(error)), -1)
        name = everyone[0].name if everyone else "?"
        return [Finding("invalid", name, rank, -1, -1, 0, str(error))]
    findings = happens_before(phases, iterations)
    if any(finding.rule == "deadlock" for finding in findings):
        return findings
    for seed in range(seeds):
        found = symbolic_run(
            phases,
            kind,
            iterations=iterations,
            layers=layers,
            seed=seed,
            root=options.get("root", 0),
            results=results,
        )
        if found:
            return findings + found
    return findings


def assert_ok(
    plans: str | Sequence[Plan] | Sequence[Sequence[Plan]],
    size: int | None = None,
    count: int | None = None,
    **how: Any,
) -> None:
    """Raise PlanError with all findings of :func:`check`, which takes the same parameters."""
    findings = check(plans, size, count, **how)
    if findings:
        raise PlanError("\n".join(map(str, findings)))


def _by_phase(plans: Sequence[Plan] | Sequence[Sequence[Plan]]) -> list[list[Plan]]:
    """Return ``phases[f][r]``; a plain list of plans is one phase."""
    single = [plan for plan in plans if isinstance(plan, Plan)]
    if single:
        return [single]
    return [list(ranks) for ranks in plans if not isinstance(ranks, Plan)]
