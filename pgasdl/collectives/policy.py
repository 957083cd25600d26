"""Policies: which plan runs for which operation and size, as text.

>>> policy = Policy.parse("allreduce:0-64k:tree#64k-inf:chain(chunks=8)")
>>> policy.find("allreduce", 100_000)
Choice(plan='chain', options=(('chunks', 8),))
>>> str(policy)
'allreduce:0-64k:tree#64k-inf:chain(chunks=8)'

Grammar: ``OPERATION:LOW-HIGH:PLAN#LOW-HIGH:PLAN...``; ``;`` or a new line separates operations.
Sizes are bytes, from LOW to below HIGH, with the units k, m and g (powers of 1024), or ``inf``.
An option may be several numbers, such as groups of unlike sizes: ``gdraa-nodes(group_size=7+8)``.
For sizes that are not listed the plan is chosen automatically. Lines of a file that begin with
``#`` are comments.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from pgasdl.errors import ConfigError, PlanError
from pgasdl.plans import PLANS, build
from pgasdl.plans.plan import EXCHANGES, Sizes

# An operation of a policy is a kind of plan; ``allreduce`` stands for all kinds of exchange.
# ``allreduce-array`` is for arrays outside segments; without it, ``allreduce`` applies to them.
OPERATIONS = (
    "allreduce",
    "allreduce-array",
    "reduce",
    "broadcast",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_RULE = re.compile(
    r"([0-9]{1,15}[kmg]?)-([0-9]{1,15}[kmg]?|inf):([a-z][a-z0-9-]*)(?:\(([^()]*)\))?"
)
_OPTION = re.compile(r"([a-z_]+)=([0-9]{1,9}(?:\+[0-9]{1,9})*)")
EXAMPLE = "allreduce:0-64k:tree#64k-inf:gdraa"
_LONGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan and the options it is built with, as pairs."""

    plan: str
    options: tuple[tuple[str, Sizes], ...] = ()

    def __str__(self) -> str:
        inside = ",".join(f"{name}={_numbers(value)}" for name, value in self.options)
        return f"{self.plan}({inside})" if inside else self.plan


@dataclass(frozen=True, slots=True)
class Rule:
    """The choice for ``low <= bytes < high``."""

    low: int
    high: float
    choice: Choice

    def __str__(self) -> str:
        return f"{_size(self.low)}-{_size(self.high)}:{self.choice}"


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules by operation, in ascending order; equal policies print the same text."""

    rules: tuple[tuple[str, tuple[Rule, ...]], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Parse a policy; ConfigError names the part that is wrong, and what is possible."""
        if len(text) > _LONGEST:
            raise ConfigError(f"policy of {len(text)} characters: at most {_LONGEST}")
        found: dict[str, tuple[Rule, ...]] = {}
        for line in text.splitlines():
            if line.lstrip().startswith("#"):
                continue
            for part in filter(None, re.sub(r"\s", "", line).split(";")):
                operation, _, rest = part.partition(":")
                if operation not in OPERATIONS:
                    known = ", ".join(OPERATIONS)
                    raise ConfigError(f"policy: no operation {operation[:50]!r}; there are {known}")
                if operation in found:
                    raise ConfigError(f"policy: operation {operation} comes twice")
                found[operation] = _rules(operation, rest)
        return cls(tuple((name, found[name]) for name in OPERATIONS if name in found))

    def __str__(self) -> str:
        return ";".join(f"{name}:{'#'.join(map(str, rules))}" for name, rules in self.rules)

    def find(self, operation: str, nbytes: int) -> Choice | None:
        """Return the choice for ``nbytes``; None: no rule covers it."""
        for name, rules in self.rules:
            if name == operation:
                for rule in rules:
                    if rule.low <= nbytes < rule.high:
                        return rule.choice
        return None


def operation_of(kind: str) -> str:
    """Return the operation that a kind of plan belongs to."""
    return "allreduce" if kind in EXCHANGES else kind


def load(text: str) -> Policy:
    """Return the policy that ``PGASDL_POLICY`` gives: its text, or ``@`` and the path of a file."""
    if not text.startswith("@"):
        return Policy.parse(text)
    path = text[1:]
    try:
        with open(path, encoding="utf-8") as file:
            return Policy.parse(file.read(_LONGEST + 1))
    except (OSError, ValueError) as error:
        raise ConfigError(f"policy file {path}: {error}") from None


def _rules(operation: str, text: str) -> tuple[Rule, ...]:
    rules: list[Rule] = []
    for part in text.split("#"):
        match = _RULE.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"policy: {operation}: {part[:100]!r} is no LOW-HIGH:PLAN, as in {EXAMPLE}"
            )
        low, high = _bytes(match[1]), _bytes(match[2])
        if not low < high:
            raise ConfigError(f"policy: {operation}: no size is in {match[1]}-{match[2]}")
        if rules and low < rules[-1].high:
            raise ConfigError(
                f"policy: {operation}: {part[:100]} begins before {rules[-1]} ends: ascending, "
                "and each size once"
            )
        rules.append(Rule(int(low), high, _choice(operation, match[3], match[4])))
    return tuple(rules)


def _choice(operation: str, plan: str, options: str | None) -> Choice:
    if plan not in PLANS:
        raise ConfigError(
            f"policy: no plan named {plan!r}; there are {', '.join(sorted(PLANS))}, and those that "
            "PGASDL_PLAN_MODULES brings"
        )
    kinds = _kinds(plan, operation)
    if not kinds:
        able = ", ".join(sorted(name for name in PLANS if _kinds(name, operation)))
        raise ConfigError(f"policy: plan {plan} is no {operation}; these are: {able}")
    pairs: list[tuple[str, Sizes]] = []
    for pair in options.split(",") if options else ():
        match = _OPTION.fullmatch(pair)
        if match is None:
            raise ConfigError(f"policy: plan {plan}: {pair[:50]!r} is no option, as in chunks=8")
        several = tuple(map(int, match[2].split("+")))
        pairs.append((match[1], several if len(several) > 1 else several[0]))
    choice = Choice(plan, tuple(sorted(pairs)))
    try:
        # Whether the plan takes these options does not depend on the number of ranks.
        build(plan, 0, 2, 64, kind=kinds[0], wire=False, **dict(pairs))
    except PlanError as error:
        raise ConfigError(f"policy: {choice}: {error}") from None
    return choice


def _kinds(plan: str, operation: str) -> list[str]:
    """Return those of a plan's kinds that belong to an operation."""
    wanted = operation.removesuffix("-array")
    return [kind for kind in PLANS[plan].kinds if operation_of(kind) == wanted]


def _numbers(value: Sizes) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _bytes(text: str) -> float:
    if text == "inf":
        return math.inf
    unit = text[-1] if text[-1] in _UNITS else ""
    return int(text.removesuffix(unit)) * _UNITS[unit]


def _size(nbytes: float) -> str:
    if nbytes == math.inf:
        return "inf"
    for unit in ("g", "m", "k"):
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{int(nbytes) // _UNITS[unit]}{unit}"
    return str(int(nbytes))
