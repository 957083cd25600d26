"""The program of every rank. Rank 0 also prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import pgasdl
from pgasdl.context import Context
from pgasdl.errors import PgasError, PlanError, UnavailableError
from pgasdl.models import layers
from pgasdl.tools.bench import plans
from pgasdl.tools.bench.floors import SocketFloor
from pgasdl.tools.bench.ours import Ours
from pgasdl.tools.bench.output import Output, Report, ratio, short
from pgasdl.tools.bench.request import Request
from pgasdl.tools.bench.session import Session
from pgasdl.tools.bench.turns import Contender, best_of, usual


def measure(context: Context, request: Request) -> None:
    """Measure the request; UnavailableError: the ranks do not map each other's memory."""
    if request.op in ("plans", "tune"):
        plans.measure(context, request)
    elif request.op == "c10d":
        from pgasdl.tools.bench import c10d  # not without PyTorch

        c10d.measure(context, request)
    else:
        _Bench(context, request, Output(context.rank, as_json=request.as_json)).run()


_COLUMNS = {"variant": 24, "bytes": 11, "plan": 13, "us": 10, "min": 10, "p90": 10, "floor": 10,
            "x floor": 8, "x min": 8, "placed": 8}  # fmt: skip


class _Case(NamedTuple):
    """A row's comparison: ours, run by a plan, with its floor."""

    ours: Contender
    floor: Sequence[Contender]
    plan: str


class _Bench:
    def __init__(self, context: Context, request: Request, output: Output) -> None:
        self.context, self.request, self.output = context, request, output
        self.session = Session(
            context,
            output,
            rounds=request.rounds,
            seconds=request.seconds,
            payload=self._payload(),
        )
        sockets = request.op == "write_notify" and request.transport == "tcp"
        if self.session.floors is None and not sockets:
            raise UnavailableError("the floor is measured in memory that all ranks map")
        self.floors: Any = self.session.floors or SocketFloor(context)
        self.ours = Ours(self.session, request.plan)
        self.table = Report(output, _COLUMNS)
        self.transport = context.transport_of((context.rank + 1) % context.size)

    def _payload(self) -> int:
        if self.request.op == "write_notify":
            return 2 * max(-(-size // 4096) * 4096 for size in self.request.sizes)
        if self.request.op == "allreduce":
            return max(self.request.sizes)
        return max(sum(-(-n // 16) * 64 for n in layers(name)) for name in self.request.models)

    def run(self) -> None:
        """Print the header, a row for each size or model, and where the ranks ran."""
        request, say = self.request, self.output.say
        self.session.header(request.command)
        say(f"plan       {request.plan or 'auto (chosen by size, see the table)'}")
        self.session.say_placement()
        say(
            f"figures    microseconds, medians of {request.rounds} rounds in turns; a row keeps "
            "to one placement, probed around every turn"
        )
        self.table.begin()
        for name in request.models:
            self.model(name)
        for size in request.sizes:
            if request.op == "write_notify":
                self.write_notify(size)
            else:
                self.allreduce(size)
        self.session.say_placement()
        self.table.close()

    def write_notify(self, nbytes: int) -> None:
        floor = self.floors.puts(nbytes)
        ours, free = self.ours.notified_writes(nbytes)
        self._compare([_Case(one, floor, "-") for one in ours], nbytes)
        free()

    def allreduce(self, nbytes: int) -> None:
        count = nbytes // 4
        handle, plan, free = self.ours.handle(count)
        array, fill_ns = self.ours.array(count)
        cases = [_Case(handle, self.floors.layers([count]), plan)]
        try:
            array.measure(1)  # also tries whether peers' arrays can be read
            private = self.floors.private_arrays(count, fill_ns)
            cases.append(_Case(array, private, self.request.plan or "auto"))
        except PlanError as error:
            self.output.warn(f"no row     array of {nbytes} bytes: {error}")
        self._compare(cases, nbytes)
        free()

    def model(self, name: str) -> None:
        counts = layers(name)
        ours, plan, free = self.ours.model(counts, self.request.bucket_bytes)
        ours.name = f"{name} {ours.name}"
        self._compare([_Case(ours, self.floors.layers(counts), plan)], 4 * sum(counts))
        free()

    def _compare(self, cases: Sequence[_Case], nbytes: int) -> None:
        """Measure ours and the floors in turns; add a row for each case."""
        session = self.session
        session.probe()
        lines = session.lines or [0.0]
        before = lines[-1]
        contenders = {id(one): one for case in cases for one in (case.ours, *case.floor)}
        session.take_turns(list(contenders.values()), probe=session.probe)
        for case in cases if self.context.rank == 0 else ():
            where = usual([case.ours, *case.floor])
            self._row(case, nbytes, where, [before / 1e3, lines[-1] / 1e3])

    def _row(self, case: _Case, nbytes: int, where: str, line_us: list[float]) -> None:
        """Add a row of figures in one placement, in microseconds."""
        ours, floor = case.ours.samples(where), best_of(case.floor, where).samples(where)
        row = {
            "op": self.request.op,
            "variant": case.ours.name,
            "transport": self.transport,
            "plan": case.plan,
            "ranks": self.context.size,
            "bytes": nbytes,
            "dtype": "uint8" if self.request.op == "write_notify" else "float32",
            "us": ours.median,
            "min_us": ours.least,
            "p90_us": ours.p90,
            "floor_us": floor.median,
            "floor_min_us": floor.least,
            "placement": where,
            "line_us": line_us,  # at the beginning and the end
            "machine": self.session.machine,
        }
        times = [short(us) for us in (ours.median, ours.least, ours.p90, floor.median)]
        ratios = ratio(ours.median, floor.median), ratio(ours.least, floor.least)
        self.table.add(row, (case.ours.name, str(nbytes), case.plan, *times, *ratios, where))


def _tell(
    command: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an error of pgasdl in one line: a traceback would not help the user of a command."""
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
        measure(context, request)


if __name__ == "__main__":
    main()
