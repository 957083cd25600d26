"""The ranks of one benchmark: their processors, their common beginning, and their turns."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pgasdl
from pgasdl.context import Context
from pgasdl.tools.bench import machine
from pgasdl.tools.bench.floors import Floors, placement
from pgasdl.tools.bench.output import Output
from pgasdl.tools.bench.turns import Contender, Ranks, take_turns


def _nowhere() -> str:
    return ""


class Session:
    """One benchmark on this rank. Every member is collective.

    ``payload``: the most bytes that the floor exchanges. ``pinned``: each rank stays on a processor
    of its own, if there are enough. ``floors`` is None where ranks do not map each other's memory;
    ``sync`` lets all ranks begin at once; ``lines`` has the nanoseconds of a cache line, one way,
    for each probe.
    """

    def __init__(
        self,
        context: Context,
        output: Output,
        *,
        rounds: int,
        seconds: float = 0.02,
        payload: int = 4096,
        pinned: bool = True,
    ) -> None:
        self.context, self.output, self.say = context, output, output.say
        self.rounds, self.seconds = rounds, seconds
        self.machine = machine.describe()
        self.oversubscribed = context.topology.oversubscribed
        launch = context.launch
        share = launch.local_size / len(os.sched_getaffinity(0))
        paced = context.mapped and not self.oversubscribed
        self.ranks = Ranks(context, paced, max(1.0, share))
        if pinned and launch.kind != "loopback":
            machine.pin(launch.local_rank, launch.local_size)
        self.floors = None
        self.sync: Callable[[], object] = context.barrier
        if context.mapped:
            self.floors = Floors(self.ranks, payload, self.oversubscribed)
            self.sync = self.floors.sync
        self.lines: list[float] = []

    def header(self, title: str) -> None:
        """Print the header: the measurement and the machine."""
        self.say(f"pgasdl {pgasdl.__version__} {title}")
        self.say(f"machine    {self.machine}")
        placed = "share cores" if self.oversubscribed else "a core each"
        self.say(f"ranks      {self.context.size}, {placed}")
        transport = self.context.describe().splitlines()[1].removeprefix("transport ")
        self.say(f"transport  {transport}")

    def probe(self) -> str:
        """Return the placement of the ranks' processors; "-" without common memory."""
        if self.floors is None:
            return "-"
        self.lines.append(self.floors.line_ns())
        return placement(self.lines[-1], self.oversubscribed)

    def say_placement(self) -> None:
        """Probe the placement, and print it with the latency of a cache line."""
        where = self.probe()
        if self.lines:
            self.say(f"placement  {where}: a cache line takes {self.lines[-1]:.0f} ns one way")

    def take_turns(
        self,
        contenders: Sequence[Contender],
        *,
        longer: int = 1,
        probe: Callable[[], str] = _nowhere,
    ) -> None:
        """Measure contenders, in ``longer`` times as many rounds."""
        take_turns(self.ranks, contenders, longer * self.rounds, self.seconds, probe)
