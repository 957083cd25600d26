"""The cost of a plan: the critical path of its steps under latency, bandwidth and reduction.

The model is the papers' alpha-beta-gamma, with alpha in two parts: the time that a message occupies
its sender (``startup``: chains pay it per chunk), and the time until it arrives (``latency``: GDRAA
pays it once for P - 1 messages). Thakur's and swCaffe's alpha is their sum where a rank sends one
message at a time.

The model has
    Each rank has a port out and a port in, full duplex. A Put takes ``startup + beta * bytes`` of
    the port out, in the order of posting; its first byte is at the receiver ``startup + latency``
    after it began, and takes ``beta * bytes`` of the port in, in the order of coming. Its flag is
    raised when its last byte is there. A Reduce takes ``gamma`` per byte and addition of own
    elements, and ``remote`` per byte of each span in a peer's memory, its addition included; a copy
    of own elements ``copy`` per byte. One Reduce of a rank at a time.
    Two betas: pairs inside a node (or supernode), and pairs across.
It lacks
    Links that several ranks share: ``pgasdl.simulate`` has them, event by event, and agrees with
    this module on machines without them.

Numbers may be exact (``fractions.Fraction``): nothing here rounds. Times are in the caller's unit,
usually seconds, and betas in that unit per byte.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heappop, heappush
from itertools import count as counter

from pgasdl.errors import PlanError
from pgasdl.plans.plan import (
    Call,
    Copy,
    Flush,
    Plan,
    Put,
    Reduce,
    Sizes,
    Span,
    Wait,
    begins,
    is_wire,
)

Number = float | Fraction


@dataclass(frozen=True, slots=True)
class Pair:
    """Cost of messages between two ranks: see above."""

    latency: Number
    beta: Number
    startup: Number = 0


@dataclass(frozen=True, slots=True)
class Model:
    """A machine without shared links.

    ``inside``, ``across`` : pairs of ranks in one node, and in two; None: there is one node
    ``per_node`` : ranks of each node, neighbours in the order of ranks
    ``gamma``, ``copy``, ``remote``, ``update`` : time per byte: of an addition, of a copy, of a
    span in a peer's memory, of a Call
    ``flop`` : time of a multiplication and an addition in a product of matrices
    ``blocking`` : a Put holds up its lane until it has left, because the processor copies it
    """

    inside: Pair
    across: Pair | None = None
    per_node: Sizes = 1
    gamma: Number = 0
    copy: Number = 0
    remote: Number = 0
    update: Number = 0
    flop: Number = 2e-11
    blocking: bool = False

    def pair(self, one: int, other: int) -> Pair:
        """Return the cost between two ranks."""
        if self.across is None or self._node(one) == self._node(other):
            return self.inside
        return self.across

    def _node(self, rank: int) -> int:
        if isinstance(self.per_node, tuple):
            return bisect_right(begins(sum(self.per_node), self.per_node), rank)
        return rank // self.per_node


def work(step: Reduce | Copy | Call, model: Model, item: int, wire_item: int) -> Number:
    """Return the time of a Reduce, Copy or Call."""
    if isinstance(step, Call):
        return model.update * step.n * item
    if isinstance(step, Copy):
        near = step.src.rank is None and step.dst.rank is None
        per_byte = model.copy if near else model.remote
        return per_byte * step.total * bytes_of(step.dst, item, wire_item)
    added, remote = additions(step), remote_spans(step)
    per_byte = model.gamma * added + model.remote * remote
    if not added and not remote:
        per_byte = model.copy
    return per_byte * step.n * bytes_of(step.dsts[0], item, wire_item)


def additions(step: Reduce) -> int:
    """Return the number of additions of own elements in a Reduce."""
    return max(0, sum(span.rank is None for span in step.srcs) - 1)


def remote_spans(step: Reduce) -> int:
    """Return the number of a Reduce's spans in peers' memory."""
    return sum(span.rank is not None for span in (*step.srcs, *step.dsts))


def bytes_of(span: Span, item: int, wire_item: int) -> int:
    """Return the bytes of an element in the span's buffer."""
    return wire_item if is_wire(span.buffer) else item


def finish_times(
    plans: Sequence[Plan],
    model: Model,
    *,
    item: int = 4,
    wire_item: int | None = None,
    begin: Sequence[Number] | None = None,
) -> list[Number]:
    """Return when each rank's execution ends, with all lanes and Flushes.

    ``begin`` : when each rank starts; None: all at 0. PlanError: a lane waits for ever.
    """
    return _Execution(plans, model, item, wire_item or item).run(begin or [0] * len(plans))


def predict(plans: Sequence[Plan], model: Model, *, item: int = 4) -> Number:
    """Return when the last rank ends."""
    return max(finish_times(plans, model, item=item), default=0)


@dataclass(slots=True)
class _Lane:
    rank: int
    steps: Sequence[object]
    next: int = 0
    awaits: int | None = None
    unsent: int = 0
    held: bool = False  # by a Flush, or by Puts that block


@dataclass(slots=True)
class _Port:
    queue: deque[tuple[_Lane, list[Put]]] = field(default_factory=deque)
    busy: bool = False
    receiver_free: Number = 0
    reducer_free: Number = 0


class _Execution:
    """Events in order of time; simultaneous ones in the order in which they arose."""

    def __init__(self, plans: Sequence[Plan], model: Model, item: int, wire_item: int) -> None:
        self.plans, self.model, self.item, self.wire_item = plans, model, item, wire_item
        self.now: Number = 0
        self.events: list[tuple[Number, int, str, object]] = []
        self.number = counter()
        self.ports = [_Port() for _ in plans]
        self.lanes = [[_Lane(plan.rank, steps) for steps in plan.lanes] for plan in plans]
        self.raised: list[dict[int, Number]] = [{} for _ in plans]
        self.finish: list[Number] = [0 for _ in plans]

    def push(self, at: Number, what: str, which: object) -> None:
        heappush(self.events, (at, next(self.number), what, which))

    def run(self, begin: Sequence[Number]) -> list[Number]:
        self.finish = list(begin)
        for rank, lanes in enumerate(self.lanes):
            for lane in lanes:
                self.push(begin[rank], "lane", lane)
        while self.events:
            self.now, _, what, which = heappop(self.events)
            if what == "lane":
                assert isinstance(which, _Lane)
                self.advance(which)
            elif what == "port":
                assert isinstance(which, int)
                self.serve(which)
            else:
                assert isinstance(which, tuple)
                self.arrive(*which)
        for plan, lanes in zip(self.plans, self.lanes, strict=True):
            for index, lane in enumerate(lanes):
                if lane.next < len(lane.steps):
                    raise PlanError(f"{plan.where(index, lane.next)}: waits for ever")
        return self.finish

    def advance(self, lane: _Lane) -> None:
        while lane.next < len(lane.steps):
            if not self.step(lane):
                return
        if not (self.model.blocking and lane.unsent):
            self.finish[lane.rank] = max(self.finish[lane.rank], self.now)

    def step(self, lane: _Lane) -> bool:
        """Run one step, or several Puts; False: an event resumes the lane."""
        step = lane.steps[lane.next]
        match step:
            case Put():
                self.post(lane)
                return not lane.held
            case Wait(notification):
                raised = self.raised[lane.rank].get(notification)
                if raised is None:
                    lane.awaits = notification
                    return False
                lane.next += 1
                if raised > self.now:
                    self.push(raised, "lane", lane)
                return raised <= self.now
            case Reduce() | Copy() | Call():
                lane.next += 1
                cost = work(step, self.model, self.item, self.wire_item)
                if cost:
                    port = self.ports[lane.rank]
                    port.reducer_free = max(port.reducer_free, self.now) + cost
                    self.push(port.reducer_free, "lane", lane)
                return not cost
            case Flush():
                lane.next += 1
                lane.held = lane.unsent > 0
                return not lane.held
        raise PlanError(f"no step {step!r}")

    def post(self, lane: _Lane) -> None:
        puts: list[Put] = []
        while lane.next < len(lane.steps):
            step = lane.steps[lane.next]
            if not isinstance(step, Put):
                break
            puts.append(step)
            lane.next += 1
        lane.unsent += 1
        lane.held = self.model.blocking
        puts.reverse()
        port = self.ports[lane.rank]
        port.queue.append((lane, puts))
        if not port.busy:
            self.serve(lane.rank)

    def serve(self, rank: int) -> None:
        """Serve the next message: the port out is free."""
        port = self.ports[rank]
        port.busy = False
        while port.queue:
            lane, puts = port.queue[0]
            while puts:
                put = puts.pop()
                pair = self.model.pair(rank, put.peer)
                moved = pair.beta * put.n * bytes_of(put.src, self.item, self.wire_item)
                head = self.now + pair.startup + pair.latency
                self.push(head, "head", (put, moved))
                if pair.startup + moved:
                    port.busy = True
                    self.push(self.now + pair.startup + moved, "port", rank)
                    return
            port.queue.popleft()
            lane.unsent -= 1
            if lane.held and not lane.unsent:
                lane.held = False
                self.push(self.now, "lane", lane)

    def arrive(self, put: Put, moved: Number) -> None:
        """Receive a message whose first byte is here."""
        port = self.ports[put.peer]
        port.receiver_free = max(port.receiver_free, self.now) + moved
        if put.notify is None:
            return
        self.raised[put.peer][put.notify] = port.receiver_free
        for lane in self.lanes[put.peer]:
            if lane.awaits == put.notify:
                lane.awaits = None
                lane.next += 1
                self.push(port.receiver_free, "lane", lane)
