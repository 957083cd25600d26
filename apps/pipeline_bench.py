"""Measure how much of a training iteration's exchange is hidden behind its compute.

    pgasdl run -n 2 apps/pipeline_bench.py --network resnet50 --compute wait
    pgasdl run -n 2 apps/pipeline_bench.py --network resnet50 --batch 2 --compute real \
        --variants attach,attach-phased,ddp-gloo --trace trace.json --picture resnet50.png

With ``--compute wait`` an accelerator is stood for by waits that leave the host's core free, so
that overlap can be seen on a machine with as many cores as ranks: each layer's share of the time is
its share of the operations. The time itself is ``--compute-ms``, or ``--ratio`` times the exchange
alone. With ``--compute real`` PyTorch computes on the host.

All variants (``--list`` tells them) take turns in the same processes, or, mpi4py's, in a job that
rank 0 asks in its turn. Figures are medians of all rounds; shares and ratios are taken round by
round. An iteration is one among others: its exchanges may end in the next. The hidden share is
1 - (iteration - compute) / exchange: compute is an iteration of the variant "compute", exchange is
that of all layers at once, with nothing else to do. Weak scaling: every rank has a batch of
``--batch``; strong: all ranks have it together. The speedup is against "one-rank", which has the
machine to itself.

``--data`` adds rows whose iterations take images of tars (jpg, cls) through pgasdl.input, decoded
in threads, and says how long they wait for them.

``--trace`` writes what every rank did in some more iterations, on one clock: https://ui.perfetto.dev
opens it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from bench.pipeline.cases import Case, latest
from bench.pipeline.fed import Input, Share
from bench.pipeline.figures import Row, by_module, layer_table, rows, table
from bench.pipeline.networks import NETWORKS
from bench.pipeline.ours import Average
from bench.pipeline.picture import draw
from bench.pipeline.settings import Settings
from bench.pipeline.variants import BASELINES, VARIANTS, Job, Variant
from bench.timeline import Recorded, Span, write

import pgasdl
from pgasdl.errors import PlanError, UnavailableError
from pgasdl.tools.bench.machine import pin
from pgasdl.tools.bench.output import Output
from pgasdl.tools.bench.session import Session
from pgasdl.tools.bench.turns import MIXED, PATIENCE

_DEFAULT = "attach,attach-thread,attach-phased,ddp-gloo,ddp-pgasdl,mpi-layers,mpi-fused"
_OF_WAITS = "caffegpi,mimatrix,swcaffe,sc-b,sc-ob-naive,sc-ob,sc-obr"
_TRACED = 2  # iterations


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        description="Measure how much of an iteration's exchange is hidden behind its compute."
    )
    add = made.add_argument
    add("--network", choices=sorted(NETWORKS), default="resnet50")
    add("--variants", default="", metavar="NAME,...", help="all, or some; --list tells them")
    add("--list", action="store_true", help="list the variants, and end")
    add("--compute", choices=("wait", "real"), default="wait")
    add("--scaling", choices=("weak", "strong"), default="weak")
    add("--batch", type=int, default=2, help="of each rank; with strong scaling, of all")
    add("--data", metavar="FOLDER|URL", help="also measure iterations with images from there")
    add("--size", type=int, help="pixels of an image's side, or tokens of a text")
    add("--compute-ms", type=float, help="compute of an iteration of one rank's batch, in waits")
    add("--ratio", type=float, default=2.0, help="without that: times the exchange alone")
    add("--write", action="store_true", help="in waits, the host's core writes every gradient")
    add("--rounds", type=int, default=7, help="turns of each variant")
    add("--iterations", type=int, default=3, help="of one turn")
    add("--threads", type=int, help="of PyTorch on each rank; default: cores by ranks")
    add("--mpi", choices=("openmpi", "mpich"), default="openmpi", help="for mpi4py")
    add("--layers", type=int, default=8, metavar="N", help="rows of the table by layer; 0: none")
    add("--json", nargs="?", const="-", metavar="FILE", help="all figures; -: standard output")
    add("--trace", metavar="FILE", help="for Perfetto")
    add("--picture", metavar="FILE", help="its ending says the format")
    return made


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and refuse what cannot be measured."""
    made = parser()
    given = made.parse_args(arguments)
    network = NETWORKS[given.network]
    given.size = network.size if given.size is None else given.size
    if not network.least <= given.size <= network.most:
        made.error(f"--size {given.size}: {given.network} takes {network.least} to {network.most}")
    for name, least in (("batch", 1), ("rounds", 1), ("iterations", 1), ("layers", 0)):
        if getattr(given, name) < least:
            made.error(f"--{name} {getattr(given, name)}: at least {least}")
    if given.threads is not None and given.threads < 1:
        made.error(f"--threads {given.threads}: at least 1")
    if not 0 < given.ratio <= 1000:
        made.error(f"--ratio {given.ratio:g}: above 0, up to 1000")
    if given.compute_ms is not None and not 0 < given.compute_ms <= 60_000:
        made.error(f"--compute-ms {given.compute_ms:g}: above 0, up to 60000")
    if given.compute == "real" and (given.compute_ms is not None or given.write):
        made.error("--compute-ms and --write go with --compute wait")
    if given.data and network.reads != "images":
        made.error(f"--data: {given.network} reads {network.reads}")
    for path in (given.trace, given.picture, given.json):
        folder = os.path.dirname(path or "")
        if folder and not os.path.isdir(folder):
            made.error(f"{path}: there is no folder {folder}")
    given.chosen = chosen(made, given)
    return given


def chosen(made: argparse.ArgumentParser, given: argparse.Namespace) -> list[Variant]:
    """Return the variants that were asked for."""
    table = {variant.name: variant for variant in VARIANTS}
    if given.variants == "all":
        return [each for each in VARIANTS if each.only in ("", given.compute)]
    default = _DEFAULT + ("," + _OF_WAITS if given.compute == "wait" else "")
    names = list(dict.fromkeys((given.variants or default).split(",")))
    unknown = [name for name in names if name not in table]
    if unknown:
        made.error(f"no variant {', '.join(unknown)}; there are {', '.join(table)}")
    found = [table[name] for name in names]
    for each in found:
        if each.only not in ("", given.compute):
            made.error(f"variant {each.name} goes with --compute {each.only}")
    return found


class Bench:
    """One run, on this rank. Every member is collective."""

    def __init__(self, ctx: pgasdl.Context, given: argparse.Namespace, output: Output) -> None:
        self.ctx, self.given, self.output = ctx, given, output
        cores = len(os.sched_getaffinity(0))
        batch = given.batch
        if given.scaling == "strong":
            if batch % ctx.size:
                raise SystemExit(f"--batch {batch}: not divisible by {ctx.size} ranks")
            batch //= ctx.size
        self.settings = Settings(
            given.network,
            batch,
            given.size,
            given.compute,
            given.scaling,
            seconds=(given.compute_ms or 0.0) / 1e3,
            write=given.write,
            threads=given.threads or max(1, cores // ctx.size),
        )
        torch.set_num_threads(self.settings.threads)
        self.session = Session(ctx, output, rounds=given.rounds, pinned=False)
        self.job = Job(ctx, self.settings, given.mpi)
        self.cases: list[Case] = []
        self.turns = self.per_round = 0
        self.input: Input | None = None

    def run(self) -> None:
        """Measure everything, and report."""
        self._header()
        if self.settings.compute == "wait" and not self.settings.seconds:
            self.settings.seconds = self.given.ratio * self._exchange_alone()
        with self.job:
            for variant in [*BASELINES, *self.given.chosen]:
                try:
                    self.cases.append(variant.make(self.job))
                except (PlanError, UnavailableError) as error:
                    self.output.warn(f"no row     {variant.name}: {error}")
            if self.given.data:
                fed = self.cases[1:]  # not one rank alone
                self.input = Input(self.ctx, self.given.data, self.settings, fed)
                self.cases += self.input.rows
            for case in self.cases:
                case.iteration.calls = self.given.iterations
            contenders = [one for case in self.cases for one in (case.iteration, case.exchanging)]
            self.turns, self.per_round = 0, len(contenders)
            self.session.take_turns(contenders, probe=self._probe)
            self._report({each.name: each.trace(_TRACED) for each in self.cases})
            for case in self.cases:
                case.close()
            if self.input is not None:
                self.input.close()

    def _exchange_alone(self) -> float:
        work = self.job.work
        exchange = Average(self.ctx, work.names, work.counts)
        exchange.exchange()  # touches the memory
        seconds = statistics.median(exchange.exchange() for _ in range(7))
        exchange.close()
        return latest(self.ctx, seconds)

    def _probe(self) -> str:
        """Look how far from each other the processors are, on one each; tell of whole rounds."""
        rounds, place = divmod(self.turns, self.per_round)
        if rounds and not place:
            self.output.say(f"round      {rounds} of {self.given.rounds}")
        self.turns += 1
        before = os.sched_getaffinity(0)
        pin(self.ctx.rank, self.ctx.size)
        where = self.session.probe()
        os.sched_setaffinity(0, before)
        return where

    @property
    def where(self) -> str:
        """Placement of the ranks' processors."""
        found = {where for case in self.cases for where, _ in case.iteration.turns}
        return found.pop() if len(found) == 1 else MIXED

    def _header(self) -> None:
        say, of = self.output.say, self.settings
        what = NETWORKS[of.network].reads
        counts = self.job.work.counts
        self.session.header(
            f"pipeline, {of.network}: {sum(counts):,} parameters in {len(counts)} layers"
        )
        say(f"batch      {of.batch} {what} of {of.size} on each rank; {of.scaling} scaling")

    def _report(self, traced: dict[str, list[list[Span]]]) -> None:
        recorded = {name: self._gather(name, ranks) for name, ranks in traced.items()}
        found = rows(self.cases, self.ctx.size, self.settings.scaling)
        shares = self.input.shares() if self.input is not None else []
        for row in found:
            row.layers = by_module(self.job.work, recorded[row.name][0], _TRACED)
        if self.ctx.rank != 0:
            return
        of, say = self.settings, self.output.say
        line = statistics.median(self.session.lines or [0.0])
        if of.compute == "wait":
            say(f"compute    waits of {1e3 * of.seconds:.2f} ms an iteration")
        else:
            say(f"compute    PyTorch {torch.__version__}, {of.threads} threads on each rank")
        say(f"placement  {self.where}: a cache line takes {line:.0f} ns")
        say(f"figures    medians of {self.given.rounds} rounds of {self.given.iterations} "
            "iterations, in turns")  # fmt: skip
        for line in table(found):
            say(line)
        for share in shares:
            say(f"input      {share}")
        interesting = [row for row in found if row.hidden is not None]
        if self.given.layers and interesting:
            say("")
            for line in layer_table(interesting[0], self.given.layers):
                say(line)
        self._write(found, shares, recorded, interesting)

    def _gather(self, name: str, ranks: list[list[Span]]) -> list[list[Span]]:
        """Put together what every process knows of every rank."""
        blobs = self.ctx.world.allgather(f"trace {name}", json.dumps(ranks).encode(), PATIENCE)
        known = [json.loads(blob) for blob in blobs]
        return [
            [Span(*span) for of in known if rank < len(of) for span in of[rank]]
            for rank in range(self.ctx.size)
        ]

    def _write(
        self, found: list[Row], shares: list[Share], recorded: Recorded, interesting: list[Row]
    ) -> None:
        given, of = self.given, self.settings
        if given.trace:
            write(given.trace, recorded)
            self.output.say(f"trace: {given.trace}, for https://ui.perfetto.dev")
        if given.picture:
            # Where the same exchange is phased, that shows best what overlapping is.
            names = [row.name for row in interesting]
            liked = [name for name in ("attach", "attach-phased") if name in names]
            shown = list(dict.fromkeys(liked + names))[:2]
            title = f"{of.network}, {self.ctx.size} ranks, compute: {of.compute}, {self.where}"
            draw(given.picture, title, found, [(name, recorded[name][0]) for name in shown])
            self.output.say(f"picture: {given.picture}")
        self.output.write(self._document(found, shares))

    def _document(self, found: list[Row], shares: list[Share]) -> dict[str, Any]:
        of, given = self.settings, self.given
        return {
            "network": of.network,
            "parameters": sum(self.job.work.counts),
            "ranks": self.ctx.size,
            "batch": of.batch,
            "size": of.size,
            "scaling": of.scaling,
            "compute": of.compute,
            "compute_ms": 1e3 * of.seconds if of.compute == "wait" else None,
            "write": of.write,
            "threads": of.threads,
            "rounds": given.rounds,
            "iterations": given.iterations,
            "machine": self.session.machine,
            "placement": self.where,
            "line_ns": self.session.lines,
            "variants": [row.document() for row in found],
            "input": [share.document() for share in shares],
        }


def main() -> None:
    """Join the job and measure."""
    given = options()
    if given.list:
        if os.environ.get("PGASDL_RANK", "0") == "0":
            for each in VARIANTS:
                only = f" (--compute {each.only})" if each.only else ""
                print(f"{each.name:22} {each.what}{only}")
        return
    with pgasdl.init() as ctx:
        only = given.json == "-"
        output = Output(ctx.rank, as_json=only, file=None if only else given.json)
        Bench(ctx, given, output).run()


if __name__ == "__main__":
    main()
