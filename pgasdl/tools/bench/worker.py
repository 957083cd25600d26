"""The program of every rank. Rank 0 also prints, and asks the peers in their turn."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import NamedTuple

import pgasdl
from pgasdl.context import Context
from pgasdl.errors import PgasError, PlanError
from pgasdl.models import layers
from pgasdl.tools.bench import machine, peers, plans, rdma
from pgasdl.tools.bench.floors import Floors, floor_of, placement
from pgasdl.tools.bench.ours import Ours
from pgasdl.tools.bench.output import Output
from pgasdl.tools.bench.peer import pin
from pgasdl.tools.bench.peers import Peer
from pgasdl.tools.bench.report import Report, Row, figures
from pgasdl.tools.bench.request import Request
from pgasdl.tools.bench.turns import Contender, Ranks, take_turns, usual

_PIECE = 1 << 20  # elements: 4 MB, for peers that are faster with pieces
_BUCKET = 25 << 20  # bytes: the default of DistributedDataParallel


def measure(context: Context, request: Request) -> list[Row]:
    """Measure everything that the request names; return the rows on rank 0."""
    cores = len(os.sched_getaffinity(0))
    described = machine.describe()
    asked = request.peers if context.rank == 0 else ()
    started, missing = peers.start(asked, context.size)
    if request.transport != "loopback":
        pin(context.rank, context.size)  # after the peers' start: they would inherit it
    with contextlib.ExitStack() as stack:
        for peer in started:
            stack.callback(peer.close)
        gc.collect()
        gc.disable()
        stack.callback(gc.enable)
        context.barrier(timeout=600)
        output = Output(context.rank, as_json=request.as_json)
        bench = _Bench(context, request, cores, started, described, output)
        bench.header(missing)
        for step in bench.steps():
            step()
        bench.footer()
        return bench.report.rows


class _Case(NamedTuple):
    """A row's comparison: ours, run by a plan, with its floor."""

    ours: Contender
    floor: Sequence[Contender]
    plan: str


class _Bench:
    def __init__(
        self,
        context: Context,
        request: Request,
        cores: int,
        started: list[Peer],
        described: str,
        output: Output,
    ) -> None:
        self.context, self.request = context, request
        self.oversubscribed = context.size > cores
        self.ranks = Ranks(context, not self.oversubscribed, max(1.0, context.size / cores))
        self.peers = started
        self.machine = described
        self.floors = Floors(self.ranks, self._payload(), self.oversubscribed)
        self.ours = Ours(self.ranks, self.floors.sync, request.plan)
        self.line = 0.0
        self.lines = [0.0, 0.0]
        self.output, self.say = output, output.say
        self.report = Report([peer.name for peer in started], output)
        self.transport = context.transport_of((context.rank + 1) % context.size)

    def _payload(self) -> int:
        if self.request.op == "write_notify":
            return 2 * max(-(-size // 4096) * 4096 for size in self.request.sizes)
        if self.request.op == "allreduce":
            return max(self.request.sizes)
        return max(sum(-(-n // 16) * 64 for n in layers(name)) for name in self.request.models)

    def header(self, missing: Sequence[str]) -> None:
        request = self.request
        self.say(f"pgasdl {pgasdl.__version__} bench {request.op}")
        self.say(f"machine    {self.machine}")
        placed = "share them" if self.oversubscribed else "on a core each"
        self.say(f"ranks      {self.context.size}, {placed}")
        why = self.context.describe().splitlines()[1].removeprefix("transport ")
        self.say(f"transport  {why}")
        self.say(f"plan       {request.plan or 'auto (chosen by size, see the table)'}")
        self.say_placement()
        for peer in self.peers:
            self.say(f"peer       {peer.name}: {peer.version}")
        for reason in missing:
            self.output.warn(f"no peer    {reason}")
        self.say(
            f"figures    microseconds, medians of {request.rounds} rounds in turns; a row keeps "
            "to one placement, probed around every turn"
        )
        if self.context.rank == 0:
            self.report.begin()

    def footer(self) -> None:
        self.say_placement()
        if self.context.rank == 0:
            self.report.close()

    def say_placement(self) -> None:
        line = self.floors.line_ns()
        where = placement(line, self.oversubscribed)
        self.say(f"placement  {where}: a cache line takes {line:.0f} ns one way")

    def _probe(self) -> str:
        self.line = self.floors.line_ns()
        return placement(self.line, self.oversubscribed)

    def steps(self) -> Iterator[Callable[[], None]]:
        """Yield one step for each size or model."""
        request = self.request
        if request.op == "model":
            yield from (partial(self.model, name) for name in request.models)
            return
        one = self.write_notify if request.op == "write_notify" else self.allreduce
        yield from (partial(one, size) for size in request.sizes)

    # --- the operations

    def write_notify(self, nbytes: int) -> None:
        floor = self.floors.puts(nbytes)
        ours, free = self.ours.notified_writes(nbytes)
        asked = [
            Contender(f"{peer.name} {way}", "peer", partial(peer.ping, way, nbytes))
            for peer in self.peers
            for way in peer.ways
        ]
        self._turns(floor + ours + asked)
        for contender in ours:
            self._row(_Case(contender, floor, "-"), nbytes, asked)
        free()

    def allreduce(self, nbytes: int) -> None:
        count = nbytes // 4
        asked = self._allreduces(
            {"": [count], " 4 MB pieces": _pieces([count])} if count > _PIECE else {"": [count]}
        )
        handle, plan, free = self.ours.handle(count)
        in_place = self.floors.in_place(count)
        array, fill_ns = self.ours.array(count)
        cases = [_Case(handle, in_place, plan)]
        try:
            array.measure(1)  # also tries whether peers' arrays can be read
            private = self.floors.private_arrays(count, fill_ns)
            cases.append(_Case(array, private, self.request.plan or "auto"))
        except PlanError as error:
            self.output.warn(f"no row     array of {nbytes} bytes: {error}")
        self._turns([*(one for case in cases for one in (case.ours, *case.floor)), *asked])
        for case in cases:
            self._row(case, nbytes, asked)
        free()

    def model(self, name: str) -> None:
        counts = layers(name)
        asked = self._allreduces(
            {
                " layers": list(counts),
                " 25 MB buckets": _buckets(counts, _BUCKET),
                " 4 MB pieces": _pieces([sum(counts)]),
                " fused": [sum(counts)],
            }
        )
        ours, plan, free = self.ours.model(counts, self.request.bucket_bytes)
        ours.name = f"{name} {ours.name}"
        floor = self.floors.layers(counts)
        self._turns([ours, *floor, *asked])
        self._row(_Case(ours, floor, plan), 4 * sum(counts), asked)
        free()

    # --- what they share

    def _allreduces(self, variants: dict[str, list[int]]) -> list[Contender]:
        def ask(peer: Peer, cuts: list[int], calls: int) -> list[float]:
            ranks = self.ranks
            return peer.allreduce(cuts, calls, paced=ranks.paced, fill_share=ranks.fill_share)

        return [
            Contender(f"{peer.name}{variant}", "peer", partial(ask, peer, cuts))
            for peer in self.peers
            for variant, cuts in variants.items()
        ]

    def _turns(self, contenders: Sequence[Contender]) -> None:
        request = self.request
        self._probe()
        before = self.line
        take_turns(self.ranks, contenders, request.rounds, request.seconds, self._probe)
        self.lines = [before / 1e3, self.line / 1e3]

    def _row(self, case: _Case, nbytes: int, asked: Sequence[Contender]) -> None:
        if self.context.rank != 0:
            return
        where = usual([case.ours, *case.floor])
        floored = floor_of(case.floor, where)
        theirs = {one.name: one.samples(where) for one in asked}
        self.report.add(
            Row(
                op=self.request.op,
                variant=case.ours.name,
                transport=self.transport,
                plan=case.plan,
                ranks=self.context.size,
                bytes=nbytes,
                dtype="uint8" if self.request.op == "write_notify" else "float32",
                floor_us=floored.median,
                floor_min_us=floored.least,
                placement=where,
                line_us=self.lines,
                machine=self.machine,
                peers={name: samples.median for name, samples in theirs.items() if samples.values},
                **figures(case.ours.samples(where)),
            )
        )


def _pieces(cuts: Sequence[int]) -> list[int]:
    return [min(_PIECE, count - start) for count in cuts for start in range(0, count, _PIECE)]


def _buckets(counts: Sequence[int], nbytes: int) -> list[int]:
    buckets: list[int] = []
    room = 0
    for count in counts:
        if room <= 0:
            buckets.append(0)
            room = nbytes
        buckets[-1] += count
        room -= 4 * count
    return buckets


def _tell(
    command: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Tell an error of pgasdl in one line: who typed the command has no use for a traceback."""
    if isinstance(error, PgasError):
        rank = f"rank {os.environ['PGASDL_RANK']}: " if "PGASDL_RANK" in os.environ else ""
        sys.stderr.write(f"pgasdl {command}: {rank}{error}\n")
    else:
        sys.__excepthook__(kind, error, trace)


def main() -> None:
    """Run one process of the job that ``pgasdl bench`` starts."""
    request = Request.load(sys.argv[1])
    sys.excepthook = partial(_tell, request.command)
    with pgasdl.init(plan_modules=request.plan_modules) as context:
        if request.op == "rdma":
            rdma.measure(context, request)
        elif request.op in ("plans", "tune"):
            plans.measure(context, request)
        elif request.op == "mpi":
            from pgasdl.tools.bench import mpi  # not without mpi4py

            mpi.measure(context, request)
        elif request.op == "c10d":
            from pgasdl.tools.bench import c10d  # not without PyTorch

            c10d.measure(context, request)
        else:
            measure(context, request)


if __name__ == "__main__":
    main()
