"""Happens-before over all ranks' plans: a proof for every interleaving, not for a sample.

A plan has no branches, each notification has one raiser and one waiter, and a satisfied Wait stays
satisfied. So the same steps wait for each other in every run: two accesses are either ordered in
every run, or unordered in some. This module unrolls a few iterations, derives the order with vector
clocks, and reports each unordered pair of accesses to the same elements, one of them a write.

Ordered are
    the steps of a lane; an execution's begin and end with its lanes; the application's own use of
    ``data`` and ``weights`` between executions (it may read and write all of them there);
    a Put with the Wait for its flag; Flush with the source reads of its lane's Puts; a flag with
    every earlier Put of the same lane and execution to the same peer.
Not ordered is
    anything else: two lanes, two Puts to one peer, two flags.
How long an access lasts
    a Put reads its source and writes its target at any time from its posting until a Wait or
    Flush proves otherwise; a Reduce or Call reads and writes as long as it runs.

Iteration i executes phase ``i % phases``. Rounds of all phases repeat the same pattern, and nothing
in one precedes an earlier one. So two unrolled rounds suffice: their order holds for any two
neighbouring rounds.
Layers share neither buffers nor notifications: a proof for one holds for any number in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pgasdl.plans.checker import Finding
from pgasdl.plans.plan import (
    APPLICATION_BUFFERS,
    Call,
    Copy,
    Flush,
    Plan,
    Put,
    Reduce,
    Span,
    Step,
    Wait,
    describe,
)

Clock = list[int]
# One instant of a chain (a lane of a rank): (chain, position). Positions count from 1.
Instant = tuple[int, int]


@dataclass(slots=True, eq=False)
class _Moment:
    """A lane at a step, with its knowledge of all chains then."""

    rank: int
    lane: int
    step: int
    iteration: int
    chain: int
    position: int
    clock: Clock


@dataclass(slots=True, eq=False)
class _Access:
    """Elements read or written from a moment on, until one of ``ends`` has happened."""

    write: bool
    begin: _Moment
    ends: list[Instant]


@dataclass(slots=True, eq=False)
class _Flight:
    """A posted Put: its moment, and the instants that prove its ends."""

    put: Put
    posted: _Moment
    channel: list[_Flight]
    read_ends: list[Instant] = field(default_factory=list)
    write_ends: list[Instant] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Lane:
    """The progress of one lane."""

    rank: int
    index: int
    chain: int
    clock: Clock
    position: int = 0
    next_step: int = 0
    done: bool = True
    unflushed: list[_Flight] = field(default_factory=list)
    channels: dict[int, list[_Flight]] = field(default_factory=dict)


def happens_before(
    phases: Sequence[Sequence[Plan]], iterations: int | None = None
) -> list[Finding]:
    """Report deadlocks, races and notifications raised too early, over all interleavings.

    ``phases[f][r]`` is rank r's plan of phase f; two rounds and one iteration more are the default.
    """
    return _Unrolled(phases, iterations or 2 * len(phases) + 1).findings()


class _Unrolled:
    def __init__(self, phases: Sequence[Sequence[Plan]], iterations: int) -> None:
        self._phases = phases
        self._ranks = range(len(phases[0]))
        self._iterations = iterations
        self._memory: dict[tuple[int, str], list[tuple[int, int, _Access]]] = {}
        self._raised: dict[tuple[int, int, int], _Flight] = {}
        self._awaited: dict[tuple[int, int, int], Instant] = {}
        self._iteration = [-1 for _ in self._ranks]
        width = max(1, *(len(plan.lanes) for plans in phases for plan in plans))
        chains = width * len(self._ranks)
        self._lanes = [
            [_Lane(rank, index, rank * width + index, [0] * chains) for index in range(width)]
            for rank in self._ranks
        ]

    def findings(self) -> list[Finding]:
        ready = set(self._ranks)
        for rank in sorted(ready):
            self._begin(rank)
        while ready:
            self._advance(ready.pop(), ready)
        return [*self._deadlocks(), *self._races(), *self._early_flags()]

    def _plan(self, rank: int, iteration: int) -> Plan:
        return self._phases[iteration % len(self._phases)][rank]

    def _begin(self, rank: int) -> bool:
        """Give the application its turn, then start the next execution, if any."""
        first, *others = self._lanes[rank]
        for lane in others:
            first.clock = _join(first, lane.clock, lane.chain, lane.position)
        first.position += 1
        self._iteration[rank] += 1
        for buffer in APPLICATION_BUFFERS:
            n = self._plan(rank, 0).buffers.get(buffer, 0)
            if n:
                self._record(first, Span(buffer, 0), n, write=True, step=-1)
        if self._iteration[rank] == self._iterations:
            return False
        for lane in self._lanes[rank]:
            lane.next_step = 0
            lane.done = False
            lane.unflushed = []
            lane.channels = {}
            if lane is not first:
                lane.clock = _join(lane, first.clock, first.chain, first.position)
        return True

    def _advance(self, rank: int, ready: set[int]) -> None:
        """Run rank's lanes as far as they go; ``ready`` collects the ranks that this wakes."""
        while self._iteration[rank] < self._iterations:
            for lane in self._lanes[rank]:
                if not lane.done:
                    self._run(lane, ready)
            if not all(lane.done for lane in self._lanes[rank]):
                return
            self._begin(rank)

    def _run(self, lane: _Lane, ready: set[int]) -> None:
        steps = self._steps(lane)
        while lane.next_step < len(steps):
            step = steps[lane.next_step]
            if isinstance(step, Wait):
                key = (lane.rank, step.notification, self._iteration[lane.rank])
                if key not in self._raised:
                    return
                self._wait(lane, key)
            else:
                lane.position += 1
            match step:
                case Put():
                    self._post(lane, step, ready)
                case Reduce() | Copy() | Call():
                    for span, n, writes in _touched(step):
                        self._record(lane, span, n, write=writes)
                case Flush():
                    for flight in lane.unflushed:
                        flight.read_ends.append((lane.chain, lane.position))
                    lane.unflushed = []
            lane.next_step += 1
        lane.done = True

    def _wait(self, lane: _Lane, key: tuple[int, int, int]) -> None:
        flight = self._raised[key]
        posted = flight.posted
        lane.clock = _join(lane, posted.clock, posted.chain, posted.position)
        lane.position += 1
        now = (lane.chain, lane.position)
        self._awaited[key] = now
        for earlier in flight.channel:
            if earlier.posted.position <= posted.position:
                earlier.read_ends.append(now)
                earlier.write_ends.append(now)

    def _post(self, lane: _Lane, put: Put, ready: set[int]) -> None:
        posted = self._moment(lane)
        channel = lane.channels.setdefault(put.peer, [])
        flight = _Flight(put, posted, channel)
        channel.append(flight)
        lane.unflushed.append(flight)
        if put.n:
            self._record(lane, put.src, put.n, write=False, ends=flight.read_ends)
            target = Span(put.dst.buffer, put.dst.offset, put.peer)
            self._record(lane, target, put.n, write=True, ends=flight.write_ends)
        if put.notify is not None:
            self._raised.setdefault((put.peer, put.notify, posted.iteration), flight)
            ready.add(put.peer)

    def _moment(self, lane: _Lane, step: int | None = None) -> _Moment:
        """Return the lane's place now, or ``step`` instead of its current step."""
        return _Moment(
            lane.rank,
            lane.index,
            lane.next_step if step is None else step,
            self._iteration[lane.rank],
            lane.chain,
            lane.position,
            lane.clock,
        )

    def _record(
        self,
        lane: _Lane,
        span: Span,
        n: int,
        *,
        write: bool,
        step: int | None = None,
        ends: list[Instant] | None = None,
    ) -> None:
        """Note an access of the lane's current step; without ``ends`` it ends with the step."""
        owner = lane.rank if span.rank is None else span.rank
        here = [(lane.chain, lane.position)]
        access = _Access(write, self._moment(lane, step), here if ends is None else ends)
        accesses = self._memory.setdefault((owner, span.buffer), [])
        accesses.append((span.offset, span.offset + n, access))

    def _deadlocks(self) -> list[Finding]:
        findings = []
        for rank in self._ranks:
            for lane in self._lanes[rank]:
                if not lane.done:
                    iteration = self._iteration[rank]
                    name = self._plan(rank, iteration).name
                    step = self._steps(lane)[lane.next_step]
                    owner = self._owner(rank, step.notification if isinstance(step, Wait) else -1)
                    text = f"waits for ever ({describe(step)}), {owner}"
                    findings.append(
                        Finding("deadlock", name, rank, lane.index, lane.next_step, iteration, text)
                    )
        return findings

    def _owner(self, rank: int, notification: int) -> str:
        """Name the step that should raise a notification, and the place where its lane stands."""
        for plan in self._phases[self._iteration[rank] % len(self._phases)]:
            for lane, index, step in plan.steps():
                if isinstance(step, Put) and (step.peer, step.notify) == (rank, notification):
                    at = self._lanes[plan.rank][lane]
                    return (
                        f"owed by rank {plan.rank}, lane {lane}, step {index}, which is at step "
                        f"{at.next_step} of iteration {self._iteration[plan.rank]}"
                    )
        return "owed by nobody"

    def _races(self) -> list[Finding]:
        findings: dict[tuple[object, ...], Finding] = {}
        for (rank, buffer), accesses in self._memory.items():
            cuts = sorted({cut for low, high, _ in accesses for cut in (low, high)})
            place = {cut: index for index, cut in enumerate(cuts)}
            pieces: list[list[_Access]] = [[] for _ in cuts]
            for low, high, access in accesses:
                for index in range(place[low], place[high]):
                    pieces[index].append(access)
            for index, piece in enumerate(pieces):
                for first, second in _conflicts(piece):
                    steps = [(a.begin.rank, a.begin.lane, a.begin.step) for a in (first, second)]
                    key = (rank, buffer, *steps)
                    if key not in findings:
                        elements = f"{buffer}[{cuts[index]}:{cuts[index + 1]}] of rank {rank}"
                        findings[key] = self._race(first, second, elements)
        return list(findings.values())

    def _race(self, first: _Access, second: _Access, elements: str) -> Finding:
        if first.begin.step < 0:
            first, second = second, first
        at, other = first.begin, second.begin
        text = (
            f"{self._text(first)} while {self._text(second)} in iteration {other.iteration}: "
            f"nothing orders their accesses to {elements}"
        )
        if not first.write and other.step < 0:
            text += "; a Flush, or an answer to the Put, must prove it sent before the plan ends"
        name = self._plan(at.rank, at.iteration).name
        return Finding("race", name, at.rank, at.lane, at.step, at.iteration, text)

    def _text(self, access: _Access) -> str:
        at = access.begin
        verb = "writes" if access.write else "reads"
        if at.step < 0:
            return f"the application of rank {at.rank} uses its buffers"
        step = self._plan(at.rank, at.iteration).lanes[at.lane][at.step]
        return f"rank {at.rank} {verb} ({describe(step)})"

    def _early_flags(self) -> list[Finding]:
        findings = []
        for before, after in pairwise(sorted(self._raised)):
            if before[:2] != after[:2]:
                continue
            flight = self._raised[after]
            awaited = self._awaited.get(before)
            if awaited is None or not _reached(awaited, flight.posted):
                text = (
                    f"{describe(flight.put)}: rank {after[0]} may not have waited for the "
                    f"notification of iteration {before[2]} yet"
                )
                at = flight.posted
                name = self._plan(at.rank, at.iteration).name
                where = (at.rank, at.lane, at.step, at.iteration)
                findings.append(Finding("notification", name, *where, text))
        return findings

    def _steps(self, lane: _Lane) -> tuple[Step, ...]:
        lanes = self._plan(lane.rank, self._iteration[lane.rank]).lanes
        return lanes[lane.index] if lane.index < len(lanes) else ()


def _touched(step: Reduce | Copy | Call) -> Iterator[tuple[Span, int, bool]]:
    """Yield each span that a step touches, its elements, and whether it is written."""
    match step:
        case Reduce(dsts, srcs, n, _):
            yield from ((span, n, False) for span in srcs)
            yield from ((span, n, True) for span in dsts)
        case Copy(n=n, rows=rows):
            for dst, src in map(step.row, range(rows)):
                yield src, n, False
                yield dst, n, True
        case Call(_, span, n):
            yield span, n, False
            yield Span("weights", span.offset), n, True


def _join(lane: _Lane, clock: Clock, chain: int, position: int) -> Clock:
    """Join the clock of ``lane`` with ``clock``, and note that ``chain`` got to ``position``."""
    joined = [max(mine, theirs) for mine, theirs in zip(lane.clock, clock, strict=True)]
    joined[chain] = max(joined[chain], position)
    return joined


def _reached(instant: Instant, moment: _Moment) -> bool:
    """Return whether ``instant`` has passed, in every run, at ``moment``."""
    chain, position = instant
    if chain == moment.chain:
        return position < moment.position
    return moment.clock[chain] >= position


def _conflicts(piece: list[_Access]) -> Iterator[tuple[_Access, _Access]]:
    """Yield pairs with a write of which neither is sure to end before the other begins."""
    for place, second in enumerate(piece):
        for first in piece[:place]:
            if not (first.write or second.write):
                continue
            one, other = first.begin, second.begin
            if one.chain == other.chain and one.position == other.position:
                continue  # two spans of one step: validated to coincide
            if any(_reached(end, other) for end in first.ends):
                continue
            if not any(_reached(end, one) for end in second.ends):
                yield first, second
