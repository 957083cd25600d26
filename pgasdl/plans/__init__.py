"""Collectives as plans: a table of algorithms, which are pure functions that return steps.

>>> plan = build("gdraa", rank=0, size=3, count=1000)
>>> plan.notifications
6
"""

from __future__ import annotations

from pgasdl.errors import PlanError
from pgasdl.plans.algorithms.blocks import blocks
from pgasdl.plans.plan import (
    EXCHANGES,
    KINDS,
    Call,
    Case,
    Copy,
    Flush,
    Members,
    Plan,
    PlanSpec,
    Put,
    Reduce,
    Span,
    Step,
    Wait,
    always,
    describe,
)
from pgasdl.plans.registry import PLANS, build, build_all, build_phases, register, spec_of
from pgasdl.plans.validation import validate, validate_all, validate_phases

__all__ = [
    "EXCHANGES",
    "KINDS",
    "PLANS",
    "Call",
    "Case",
    "Copy",
    "Flush",
    "Members",
    "Plan",
    "PlanError",
    "PlanSpec",
    "Put",
    "Reduce",
    "Span",
    "Step",
    "Wait",
    "always",
    "blocks",
    "build",
    "build_all",
    "build_phases",
    "describe",
    "register",
    "spec_of",
    "validate",
    "validate_all",
    "validate_phases",
]
