"""Recursive halving and doubling: sums of smaller and smaller halves, then results in reverse.

Paper
    swCaffe section 5.1: reduce-scatter by recursive halving, all-gather by recursive doubling, and
    ranks numbered round-robin over supernodes, because links between them are over-subscribed.
    There for powers of two; here for any P, without ranks that sit out.

Steps on node v of P; nodes are in groups [low, high), first all of them, halved until each is alone
    1. mid = low + ceil((high - low) / 2). v's partner is the node at the same place in the other
       half. Put the other half's elements into the partner's slot; wait for what the partner sent;
       one Reduce of own, and received, elements of v's half. Go on with v's half as the group.
       An odd group's lower half has one more: node mid - 1 sends its part to node high - 1, which
       adds two contributions, and receives nothing.
       Alone: times the kind's factor, and in kind ``update`` Call the update.
    2. The groups in reverse: Put the result of v's half into place at the partner; wait for that of
       the other half. Node high - 1 also sends to mid - 1. Flush.
    ``reduce-scatter`` is 1, ``all-gather`` is 2.

Numbering: with ``group_size`` = 1 node v is rank v; if ranks of a supernode are neighbours, that is
the paper's adjacent numbering. With group_size = q, rank r is in supernode r div q, and nodes go
round-robin over the supernodes: the large exchanges, between distant nodes, stay inside.

Cost, for P a power of two
    2 log2 P latencies; 2 (P-1)/P S sent and received. Across supernodes 2 (P-q)/P S with adjacent
    numbering, 2 (P/q-1)/P S round-robin. Otherwise 2 ceil(log2 P), and at each level one rank at
    most of each group receives twice. Inbox: about S; not a power of two: about 2 S.

Where nobody names a plan
    One node, or nodes not known: where rounds cost less than gdraa's messages to all ranks;
    numbered round-robin over the supernodes of ``PGASDL_SUPERNODE``.
    Several nodes of q ranks: the same, against the messages of ``gdraa-nodes``, numbered
    round-robin over nodes, if q is a power of two and every node is full: else halves divide nodes.
    Both send 2 (N-1) S across in all. In simulations (the machine is in ``gdraa_nodes``) it is
    faster with 32 nodes of 8 at 16 KiB, with 64 nodes of 4 at 1 KiB, and where mates load each
    other's memory no longer with 64 KiB.

Notifications, for level l (0: all in one group)
    5 l: from the partner.  5 l + 1: from node mid - 1.  5 l + 2: the other half's result is here.
    5 l + 3, 5 l + 4: credits, in one-way kinds, of the nodes I send to: partner; the other one.

Which message proves a buffer free
    exchange: each pair's messages of step 1 are answered by those of step 2, so that
        my source of a half, the partner's slot     are free when that half's result is here
        the partner's elements of my half           are: it has sent them to me
    reduce-scatter, all-gather (one way): slots, or ``data``, are free when the receiver's credit is
        here, raised when it begins
    my source of step 2 (one way: of step 1): nobody answers it: Flush

Wire precision: as in ``trees``: sums are rounded once per level, results travel as they are.

Example: P = 3, 40 elements, blocks [0:16] [16:32] [32:40]; level 0 halves 0, 1 | 2, level 1 0 | 1;
slots of level 0 at 0 and 32, of level 1 at 64 and 80. Rank 0 runs
    Put data[32:40] -> rank 2 inbox[0:8], notify 0
    Wait 0;  Reduce data[0:32] = data[0:32] + inbox[0:32];  Put data[16:32] -> rank 1 inbox[64:80],
    notify 5;  Wait 5;  Reduce data[0:16] = 1/3 * (data[0:16] + inbox[64:80])
    Put data[0:16] -> rank 1, notify 7;  Wait 7;  Put data[0:32] -> rank 2, notify 2;  Wait 2
    Flush
Rank 1 has no partner at level 0: it puts data[32:40] into rank 2's slot inbox[32:40], notify 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pgasdl.errors import PlanError
from pgasdl.plans.algorithms.blocks import ALIGN, edge, flag, flushed, padded
from pgasdl.plans.algorithms.hierarchy import LATENCY, LATENCY_INSIDE, STARTUP
from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.algorithms.shapes import RoundRobin
from pgasdl.plans.plan import EXCHANGES, Case, Plan, PlanSpec, Put, Reduce, Span, Step, Wait

PER_LEVEL = 5
# Bytes per nanosecond that mates save inside a node by loading them.
_LOADED = 25


@dataclass(frozen=True, slots=True)
class Level:
    """One halving as a node sees it: ranges of nodes, and the nodes it talks to; -1: none."""

    number: int
    # The two halves, as (first node, node behind the last).
    mine: tuple[int, int]
    theirs: tuple[int, int]
    partner: int = -1  # the node at the same place in the other half
    # The node whose elements I also take, if I have a partner; the node that takes mine, if not.
    giver: int = -1
    taker: int = -1


def levels(node: int, size: int) -> list[Level]:
    """Return all halvings of a node, the largest first."""
    found: list[Level] = []
    low, high = 0, size
    while high - low > 1:
        mid = low + (high - low + 1) // 2
        lower, upper, half = (low, mid), (mid, high), mid - low
        odd = (high - low) % 2
        if node >= mid:
            giver = mid - 1 if odd and node == high - 1 else -1
            found.append(Level(len(found), upper, lower, node - half, giver))
            low = mid
        elif node + half < high:
            found.append(Level(len(found), lower, upper, node + half))
            high = mid
        else:
            found.append(Level(len(found), lower, upper, taker=high - 1))
            high = mid
    return found


def build(
    rank: int,
    size: int,
    count: int,
    *,
    kind: str = "average",
    wire: bool = False,
    group_size: int = 1,
) -> Plan:
    """Return rank's plan of the exchange that this module describes."""
    view = RankView("halving-doubling", rank, size, count, kind, wire)
    view.require("group_size", group_size, 1)
    if kind not in EXCHANGES and 1 < group_size < size:
        raise PlanError(
            f"plan halving-doubling: kind {kind!r} gives rank r block r, which a numbering by "
            f"groups of {group_size} does not"
        )
    if view.idle:
        return view.plan()
    halves = _Halves(view, RoundRobin(size, group_size))
    inbox = 0 if kind == "all-gather" else halves.inbox
    notifications = PER_LEVEL * (size - 1).bit_length()
    return view.plan([halves.steps()], notifications, inbox)


def _slots(size: int, count: int) -> tuple[list[tuple[int, int]], int]:
    """Return where each level's two slots begin, and where the last one ends."""
    slots, end = [], 0
    for level in range((size - 1).bit_length()):
        # The first half is the largest: earlier blocks are at least as large.
        slot = padded(edge(count, size, -(-size // (2 << level))))
        slots.append((end, end + slot))
        end += 2 * slot if size % (2 << level) else slot
    return slots, end


def _inbox(size: int, count: int, group_size: int = 1) -> int:
    del group_size
    return _slots(size, count)[1]


class _Halves:
    """One rank's side of an exchange of at least one element between at least two ranks."""

    def __init__(self, view: RankView, numbering: RoundRobin) -> None:
        self.view, self.numbering = view, numbering
        self.levels = levels(numbering.node(view.rank), view.size)
        # By level: from the partner, from the giver.
        self.slots, self.inbox = _slots(view.size, view.count)

    def steps(self) -> Iterator[Step]:
        """All steps of this rank."""
        view = self.view
        if not view.exchange:
            yield from self.credits()
        yield from view.to_wire(0, view.count)
        halves = [step for level in self.levels for step in self.halve(level)]
        doubles = [step for level in reversed(self.levels) for step in self.double(level)]
        if view.kind == "reduce-scatter":
            yield from flushed(halves)
            return
        if view.kind != "all-gather":
            yield from halves
        yield from flushed((*doubles, *view.from_wire(0, view.count)))

    def elements(self, nodes: tuple[int, int]) -> tuple[int, int]:
        """Return offset and length of the elements that a range of nodes owns."""
        low, high = (edge(self.view.count, self.view.size, node) for node in nodes)
        return low, high - low

    def to(self, node: int, notification: int, offset: int, n: int, at: Span) -> Put:
        """Put own elements to a node, from ``offset`` on."""
        buffer = self.view.send if at.buffer == self.view.receive else self.view.result
        return Put(Span(buffer, offset), n, self.numbering.rank(node), at, notification)

    def wait(self, notification: int, node: int) -> Wait:
        """Wait for a node's message."""
        return Wait(notification, self.numbering.rank(node))

    def credits(self) -> Iterator[Step]:
        """Raise the credits of all nodes that send to this one."""
        for level in self.levels:
            first = PER_LEVEL * level.number
            if self.view.kind == "reduce-scatter":
                senders = [node for node in (level.partner, level.giver) if node >= 0]
                expected, to_whom = level.mine, [(node, first + 3) for node in senders]
            else:
                sender = level.taker if level.partner < 0 else level.partner
                credit = first + 4 if level.partner < 0 else first + 3
                expected, to_whom = level.theirs, [(sender, credit)]
            if self.elements(expected)[1]:
                for node, credit in to_whom:
                    yield flag(self.numbering.rank(node), credit)

    def halve(self, level: Level) -> Iterator[Step]:
        """Yield step 1 of one level."""
        view, first = self.view, PER_LEVEL * level.number
        at, extra = (Span(view.receive, offset) for offset in self.slots[level.number])
        offset, n = self.elements(level.theirs)
        if n:
            goal = level.taker if level.partner < 0 else level.partner
            if not view.exchange:
                yield self.wait(first + 3, goal)
            alone = level.partner < 0
            yield self.to(goal, first + alone, offset, n, extra if alone else at)
        offset, n = self.elements(level.mine)
        if not n or level.partner < 0:
            return
        own, slots = Span(view.send, offset), [at]
        yield self.wait(first, level.partner)
        if level.giver >= 0:
            yield self.wait(first + 1, level.giver)
            slots.append(extra)
        last = level is self.levels[-1]
        reduced = view.reduced(offset) if last else own
        yield Reduce((reduced,), (own, *slots), n, view.scale if last else 1.0)
        if last:
            yield from view.update(offset, n)

    def double(self, level: Level) -> Iterator[Step]:
        """Yield step 2 of one level."""
        view, first = self.view, PER_LEVEL * level.number
        offset, n = self.elements(level.mine)
        if n and level.partner >= 0:
            for goal, credit in ((level.partner, first + 3), (level.giver, first + 4)):
                if goal >= 0:
                    if not view.exchange:
                        yield self.wait(credit, goal)
                    yield self.to(goal, first + 2, offset, n, Span(view.result, offset))
        if self.elements(level.theirs)[1]:
            yield self.wait(first + 2, level.taker if level.partner < 0 else level.partner)


def _suits(case: Case) -> bool:
    """Return whether its rounds cost less than gdraa's messages to all ranks."""
    size = case.members.size
    if case.members.several_nodes:
        return case.kind in EXCHANGES and _suits_nodes(case)
    # Blocks are whole cache lines: few elements have few owners.
    owners = min(size, -(-case.nbytes // (4 * ALIGN)))
    rounds = (size - 1).bit_length()
    to_all = 2 * LATENCY + (owners + size) * STARTUP
    return size > 4 and to_all > 2 * rounds * (LATENCY + STARTUP)


def _suits_nodes(case: Case) -> bool:
    """Return whether it sends no more across than gdraa-nodes, and costs less.

    >>> from pgasdl.plans import Members
    >>> _suits_nodes(Case(Members(256, 8), "sum", 16384, in_segments=False))
    True
    >>> _suits_nodes(Case(Members(256, 8), "sum", 64, in_segments=False))
    False
    """
    members = case.members
    size, nodes = members.size, members.nodes
    each = size // nodes
    # Else halves would divide nodes, and large exchanges would go across.
    if members.node_size != each or each & (each - 1):
        return False
    owners = min(nodes, -(-case.nbytes // (4 * ALIGN * each)))
    messages = min(owners, nodes - 1) + nodes - 1
    by_nodes = 2 * LATENCY + 2 * LATENCY_INSIDE + messages * STARTUP
    inside = 2 * (each.bit_length() - 1) * LATENCY_INSIDE
    across = 2 * (nodes - 1).bit_length() * (LATENCY + STARTUP)
    loads = case.nbytes // _LOADED if members.mapped_on_node and not case.wire else 0
    return inside + across + loads < by_nodes


def _tuned(case: Case) -> dict[str, int]:
    size = case.members.group_size
    if isinstance(size, tuple) or case.kind not in EXCHANGES:
        return {}
    return {"group_size": size} if size else {}


SPEC = PlanSpec(
    "halving-doubling",
    build,
    "halves, then doubles: 2 ceil(log2 P) latencies, 2(P-1)/P S; round-robin over group_size",
    kinds=("average", "sum", "update", "reduce-scatter", "all-gather"),
    suits=_suits,
    options=("group_size",),
    tuned=_tuned,
    shares=True,
    inbox=_inbox,
)
