"""Runs all ranks' plans with symbolic values under one adversarial schedule per seed.

Given the proof of ``happens_before``, one schedule suffices: without races all schedules have the
same values. More schedules check the proof itself, by other means:

* a Put reads its source, writes its target and raises its flag in three events, each as late as
  the schedule wants; only the flag waits, for the writes of earlier Puts of its lane and execution
  to the same peer;
* a Reduce or Call begins and ends; in between its targets hold garbage, and its sources must not
  change;
* lanes, ranks and layers run in any order; layers become ready in a different order on every rank;
* the application verifies the result when a plan ends and once more before it overwrites the
  gradients with new ones and changes the weights, the same way on every rank.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from pgasdl.plans.checker import Finding
from pgasdl.plans.checker.results import Region, Verdict
from pgasdl.plans.checker.symbols import Expr, Piece, SymbolicMemory, Symbols, combine
from pgasdl.plans.plan import (
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
    is_wire,
)

MAX_FINDINGS = 20


@dataclass(slots=True, eq=False)
class _Pass:
    """A running Reduce or Call, or a row of a Copy."""

    sources: list[tuple[Span, list[Piece]]]
    targets: list[Span]
    result: list[Piece]
    n: int
    torn: Expr


@dataclass(slots=True, eq=False)
class _Channel:
    """The Puts of one lane and execution to one peer, in order."""

    flights: list[_Flight] = field(default_factory=list)
    written: int = 0


@dataclass(slots=True, eq=False)
class _Flight:
    """A posted Put: not read, read (``payload`` is set), written, flagged."""

    put: Put
    lane: _Lane
    step: int
    iteration: int
    channel: _Channel
    payload: list[Piece] | None = None
    written: bool = False


@dataclass(slots=True, eq=False)
class _Lane:
    layer: int
    rank: int
    index: int
    steps: tuple[Step, ...]
    iteration: int
    next_step: int = 0
    next_row: int = 0  # of a Copy
    unread: int = 0
    flushing: bool = False
    under_way: _Pass | None = None
    channels: dict[int, _Channel] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Application:
    """One layer on one rank: when its gradients are ready, when its plan has ended."""

    layer: int
    rank: int
    lanes: list[_Lane] = field(default_factory=list)
    iteration: int = -1
    open_lanes: int = 0


def symbolic_run(
    phases: Sequence[Sequence[Plan]],
    kind: str,
    *,
    iterations: int | None = None,
    layers: int = 2,
    seed: int = 0,
    root: int = 0,
    results: Sequence[Sequence[Region]] | None = None,
) -> list[Finding]:
    """Run one schedule and report its faults; ``phases[f][r]`` is rank r's plan of phase f.

    Two rounds and one iteration more are the default. ``results``, of each rank, replace a kind's.
    """
    verdict = partial(Verdict, phases[0], kind, root=root, results=results)
    return _Replay(phases, verdict, iterations or 2 * len(phases) + 1, layers, seed).run()


class _Replay:
    def __init__(
        self,
        phases: Sequence[Sequence[Plan]],
        verdict: Callable[[Symbols], Verdict],
        iterations: int,
        layers: int,
        seed: int,
    ) -> None:
        plans = phases[0]
        self._phases = phases
        self._iterations = iterations
        self._random = random.Random(seed)  # noqa: S311 (schedules must repeat)
        self._style = ("late", "mixed", "skewed")[seed % 3]
        self._together = seed % 2 == 1
        self._pace = [self._random.random() for _ in plans]
        self._symbols = Symbols()
        self._verdict = verdict(self._symbols)
        self._findings: dict[tuple[object, ...], Finding] = {}
        self._board: dict[tuple[int, int, int], tuple[int, bool]] = {}
        self._sleepers: dict[tuple[int, int, int], _Lane] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = count()
        self._memory: dict[tuple[int, int, str], SymbolicMemory] = {}
        self._applications: list[list[_Application]] = []
        for plan in plans:
            self._applications.append([self._application(plan, layer) for layer in range(layers)])

    def _application(self, plan: Plan, layer: int) -> _Application:
        for buffer, n in plan.buffers.items():
            value = self._symbols.garbage(f"{buffer} was never written")
            if buffer == "weights":
                value = self._symbols.weights()
            self._memory[layer, plan.rank, buffer] = SymbolicMemory([(n, 0, value)])
        return _Application(layer, plan.rank)

    def run(self) -> list[Finding]:
        for layers in self._applications:
            for application in layers:
                self._push(application.rank, partial(self._turn, application))
        while self._agenda and len(self._findings) < MAX_FINDINGS:
            heapq.heappop(self._agenda)[2]()
        if not self._agenda:
            self._report_stuck()
        return list(self._findings.values())

    def _push(self, rank: int, action: Callable[[], None], *, flight: bool = False) -> None:
        """Put an event on the agenda; low keys come first."""
        key = self._random.random()
        if self._style == "late" and flight:
            key += 1.0
        elif self._style == "skewed" and not flight:
            key = self._pace[rank] + 0.2 * key
        heapq.heappush(self._agenda, (key, next(self._ticket), action))

    # The application

    def _turn(self, application: _Application) -> None:
        """Use the results of the last execution, make new gradients, start the next execution."""
        layer, rank = application.layer, application.rank
        if application.iteration >= 0:
            self._verify(application, "changed before the application was done with it")
        application.iteration += 1
        plan = self._phases[application.iteration % len(self._phases)][rank]
        if "data" in plan.buffers:
            fresh = self._symbols.gradient(rank, application.iteration)
            self._memory[layer, rank, "data"].write(0, [(plan.buffers["data"], 0, fresh)])
        if "result" in plan.buffers:
            old = self._symbols.garbage(f"not written in iteration {application.iteration}")
            self._memory[layer, rank, "result"].write(0, [(plan.buffers["result"], 0, old)])
        if "weights" in plan.buffers and application.iteration:
            weights = self._memory[layer, rank, "weights"]
            touch = self._symbols.touch
            weights.write(0, [(n, o, touch(v)) for n, o, v in weights.whole(0, plan.count)])
        if application.iteration == self._iterations:
            return
        application.open_lanes = len(plan.lanes)
        application.lanes = [
            _Lane(layer, rank, index, steps, application.iteration)
            for index, steps in enumerate(plan.lanes)
        ]
        for lane in application.lanes:
            self._push(rank, partial(self._advance, lane))
        if not application.lanes:
            self._end(application)

    def _end(self, application: _Application) -> None:
        self._verify(application, "wrong when the plan ended")
        layers = self._applications[application.rank]
        if not self._together:
            layers = [application]
        elif any(a.open_lanes or a.iteration < application.iteration for a in layers):
            return
        for other in layers:
            self._push(other.rank, partial(self._turn, other))

    def _verify(self, application: _Application, when: str) -> None:
        layer, rank = application.layer, application.rank
        memory = self._memory[layer, rank, self._verdict.buffer]
        fault = self._verdict.fault(layer, rank, application.iteration, memory)
        if fault is not None:
            text = f"{self._verdict.buffer} {when}: {fault}"
            self._report("value", (rank, -1, -1), application.iteration, text)

    # Lanes

    def _advance(self, lane: _Lane) -> None:
        """Run one step of a lane, or the second half of one."""
        if lane.under_way is not None:
            if not self._finish_pass(lane, lane.under_way):
                self._push(lane.rank, partial(self._advance, lane))
                return
        elif lane.next_step < len(lane.steps):
            step = lane.steps[lane.next_step]
            match step:
                case Put():
                    self._post(lane, step)
                case Wait(notification):
                    if not self._arrived(lane, notification):
                        return
                case Flush():
                    if lane.unread:
                        lane.flushing = True
                        return
                case Reduce() | Copy() | Call():
                    self._begin(lane, step)
                    self._push(lane.rank, partial(self._advance, lane))
                    return
        if lane.next_step < len(lane.steps):
            lane.next_step += 1
        if lane.next_step < len(lane.steps):
            self._push(lane.rank, partial(self._advance, lane))
            return
        application = self._applications[lane.rank][lane.layer]
        application.open_lanes -= 1
        if not application.open_lanes:
            self._end(application)

    def _arrived(self, lane: _Lane, notification: int) -> bool:
        key = (lane.layer, lane.rank, notification)
        value, _ = self._board.get(key, (-1, True))
        if value == lane.iteration:
            self._board[key] = (value, True)
            return True
        self._sleepers[key] = lane
        return False

    def _at(self, lane: _Lane, span: Span) -> SymbolicMemory:
        owner = lane.rank if span.rank is None else span.rank
        return self._memory[lane.layer, owner, span.buffer]

    def _begin(self, lane: _Lane, step: Reduce | Copy | Call) -> None:
        """Begin a Reduce or Call, or the next row of a Copy."""
        match step:
            case Reduce(dsts, srcs, n, scale):
                self._begin_pass(lane, srcs, dsts, n, lambda v: self._symbols.add(v, scale))
            case Copy(n=n):
                dst, src = step.row(lane.next_row)
                self._begin_pass(lane, (src,), (dst,), n, lambda v: v[0])
            case Call(_, span, n):
                weights = Span("weights", span.offset)
                update = self._symbols.update
                self._begin_pass(lane, (weights, span), (weights,), n, lambda v: update(*v))

    def _begin_pass(
        self,
        lane: _Lane,
        srcs: Sequence[Span],
        dsts: Sequence[Span],
        n: int,
        make: Callable[[list[Expr]], Expr],
    ) -> None:
        sources = [(span, self._at(lane, span).read(span.offset, n)) for span in srcs]
        result = combine(self._symbols, [pieces for _, pieces in sources], make)
        text = f"rank {lane.rank} was writing it (lane {lane.index}, step {lane.next_step})"
        torn = self._symbols.garbage(text)
        for span in dsts:
            self._at(lane, span).write(span.offset, [(n, span.offset, torn)])
        lane.under_way = _Pass(sources, list(dsts), result, n, torn)

    def _finish_pass(self, lane: _Lane, work: _Pass) -> bool:
        """End it; False: rows of a Copy are left."""
        lane.under_way = None
        for span, pieces in work.sources:
            changed = self._at(lane, span).read(span.offset, work.n) != pieces
            if changed and span not in work.targets:
                self._report_step(
                    "race", lane, f"its source {span.buffer} changed while it was read"
                )
        for span in work.targets:
            memory = self._at(lane, span)
            if any(v is not work.torn for _, _, v in memory.read(span.offset, work.n)):
                self._report_step(
                    "race", lane, f"its target {span.buffer} was written by another as well"
                )
            pieces = work.result
            if is_wire(span.buffer):
                pieces = [(n, origin, self._symbols.rounded(v)) for n, origin, v in pieces]
            memory.write(span.offset, pieces)
        step = lane.steps[lane.next_step]
        lane.next_row += 1
        if isinstance(step, Copy) and lane.next_row < step.rows:
            return False
        lane.next_row = 0
        return True

    # Puts

    def _post(self, lane: _Lane, put: Put) -> None:
        channel = lane.channels.setdefault(put.peer, _Channel())
        flight = _Flight(put, lane, lane.next_step, lane.iteration, channel)
        channel.flights.append(flight)
        if put.n:
            lane.unread += 1
            self._push(lane.rank, partial(self._carry, flight), flight=True)
        else:
            flight.written = True
            self._raise_flags(channel)

    def _carry(self, flight: _Flight) -> None:
        put, lane = flight.put, flight.lane
        if flight.payload is None:
            flight.payload = self._at(lane, put.src).read(put.src.offset, put.n)
            self._read_one(lane)
            if self._random.random() < 0.5:
                self._push(lane.rank, partial(self._carry, flight), flight=True)
                return
        self._memory[lane.layer, put.peer, put.dst.buffer].write(put.dst.offset, flight.payload)
        flight.written = True
        self._raise_flags(flight.channel)

    def _read_one(self, lane: _Lane) -> None:
        lane.unread -= 1
        if lane.flushing and not lane.unread:
            lane.flushing = False
            self._push(lane.rank, partial(self._advance, lane))

    def _raise_flags(self, channel: _Channel) -> None:
        while channel.written < len(channel.flights):
            flight = channel.flights[channel.written]
            if not flight.written:
                return
            channel.written += 1
            if flight.put.notify is not None:
                self._push(flight.lane.rank, partial(self._flag, flight), flight=True)

    def _flag(self, flight: _Flight) -> None:
        put = flight.put
        assert put.notify is not None
        key = (flight.lane.layer, put.peer, put.notify)
        value, consumed = self._board.get(key, (-1, True))
        if not consumed:
            text = (
                f"{describe(put)}: rank {put.peer} had not yet waited for the notification of "
                f"iteration {value}"
            )
            lane = flight.lane
            at = (lane.rank, lane.index, flight.step)
            self._report("notification", at, flight.iteration, text)
        self._board[key] = (flight.iteration, False)
        sleeper = self._sleepers.pop(key, None)
        if sleeper is not None:
            self._push(put.peer, partial(self._advance, sleeper))

    # Findings

    def _report_stuck(self) -> None:
        for layers in self._applications:
            for application in layers:
                for lane in application.lanes if application.open_lanes else ():
                    if lane.next_step < len(lane.steps):
                        self._report_step("deadlock", lane, "waits for ever")

    def _report_step(self, rule: str, lane: _Lane, text: str) -> None:
        text = f"{describe(lane.steps[lane.next_step])}: {text}"
        self._report(rule, (lane.rank, lane.index, lane.next_step), lane.iteration, text)

    def _report(self, rule: str, at: tuple[int, int, int], iteration: int, text: str) -> None:
        finding = Finding(rule, self._phases[0][at[0]].name, *at, iteration, text)
        self._findings.setdefault((rule, *at), finding)
