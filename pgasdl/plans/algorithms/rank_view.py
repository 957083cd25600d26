"""The common part of all plans: the buffers of a kind and a precision, and the plan's frame."""

from __future__ import annotations

from collections.abc import Iterable

from pgasdl.errors import PlanError
from pgasdl.plans.algorithms.blocks import cast, scale_of
from pgasdl.plans.plan import EXCHANGES, Call, Plan, Sizes, Span, Step


class RankView:
    """One rank's side of a collective.

    Contributions leave from buffer ``send`` and arrive in ``receive``; results leave from and
    arrive in ``result``; ``scale`` is the factor of the sum. ``exchange``: every rank contributes,
    and every rank gets the result. ``idle``: there is no other rank, or nothing to exchange.
    """

    def __init__(self, name: str, rank: int, size: int, count: int, kind: str, wire: bool) -> None:
        self.name, self.rank, self.size, self.count = name, rank, size, count
        self.kind, self.wire = kind, wire
        self.exchange = kind in EXCHANGES
        self.send, self.receive = ("wire_out", "wire_in") if wire else ("data", "inbox")
        self.result = "weights" if kind == "update" else self.send
        self.scale = scale_of(kind, size)
        self.idle = size == 1 or not count

    def require(self, option: str, value: int, least: int) -> int:
        """Return the ``value`` of an option; PlanError if it is below ``least``."""
        if value < least:
            raise PlanError(f"plan {self.name}: {option} is {value}, at least {least} is needed")
        return value

    def require_sizes(self, option: str, sizes: Sizes, least: int = 1) -> None:
        """Raise PlanError if there is no size, or one below ``least``, or below 1 among several."""
        if isinstance(sizes, tuple):
            self.require(option, min(sizes, default=0), 1)
        else:
            self.require(option, sizes, least)

    def require_root(self, root: int) -> int:
        """Return ``root``; PlanError if it is not a rank."""
        if not 0 <= root < self.size:
            raise PlanError(f"plan {self.name}: root {root} is not one of {self.size} ranks")
        return root

    def plan(
        self,
        lanes: Iterable[Iterable[Step]] = (),
        notifications: int = 0,
        inbox: int = 0,
        *,
        mapped: bool = False,
    ) -> Plan:
        """Make the plan of these lanes, without empty ones; an idle rank's plan has none."""
        buffers = {"data": self.count}
        if self.kind == "update":
            buffers["weights"] = self.count
        if self.idle:
            lanes, notifications = [self.update(0, self.count)], 0
        else:
            if inbox:
                buffers[self.receive] = inbox
            if self.wire:
                buffers["wire_out"] = self.count
        full = tuple(steps for steps in map(tuple, lanes) if steps)
        return Plan(
            self.name, self.rank, self.size, self.count, full, buffers, notifications, mapped=mapped
        )

    def reduced(self, offset: int) -> Span:
        """Return where a finished sum goes: to be sent on, or to the update."""
        return Span("data" if self.kind == "update" else self.send, offset)

    def update(self, offset: int, n: int) -> list[Step]:
        """Return the owner's update of some elements, in kind ``update``."""
        return [Call("update", Span("data", offset), n)] if self.kind == "update" and n else []

    def to_wire(self, offset: int, n: int) -> list[Step]:
        """Return the cast of own elements to wire precision."""
        return [cast("data", "wire_out", offset, n)] if self.wire and n else []

    def from_wire(self, offset: int, n: int) -> list[Step]:
        """Return the cast of results back from wire precision."""
        return [cast("wire_out", "data", offset, n)] if self.result == "wire_out" and n else []
