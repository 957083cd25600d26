"""From samples and spans to figures, and to tables."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from bench.pipeline.cases import Case
from bench.pipeline.workload import Workload
from bench.timeline import Span
from pgasdl.tools.bench.turns import Contender


@dataclass(slots=True)
class LayerRow:
    """The costs of one module in an iteration, in milliseconds on one rank.

    ``exchange`` is the longest of its layers' exchanges, from the moment when it began until this
    rank saw its end; ``waiting`` is the host's wait for it before the module's forward pass; with
    ``pgasdl.torch.attach`` also the optimizer's step of the module, which is made there.
    """

    name: str
    bytes: int
    forward: float = 0.0
    backward: float = 0.0
    exchange: float = 0.0
    waiting: float = 0.0


@dataclass(slots=True)
class Row:
    """The figures of a variant; times in milliseconds, medians of all rounds."""

    name: str
    what: str
    plan: str
    # An iteration among others, and the exchange of one alone.
    iteration: float
    exchange: float
    compute: float  # an iteration of the variant "compute" in the same rounds
    hidden: float | None  # 1 - (iteration - compute) / exchange; None: no exchange
    communication: float  # share of the iteration that is not compute: 1 - compute / iteration
    # Against one rank alone; efficiency is speedup by rank.
    speedup: float
    efficiency: float
    relative: float | None  # the iteration by that of ddp-gloo, if that was measured
    # By round.
    samples: list[float]
    exchange_samples: list[float]
    layers: list[LayerRow] = field(default_factory=list)  # from the trace

    def document(self) -> dict[str, object]:
        """Return the fields for JSON."""
        return asdict(self)


def rows(cases: Sequence[Case], n_ranks: int, scaling: str) -> list[Row]:
    """Compare cases round by round; the first two are the baselines."""
    alone, compute = cases[:2]
    ddp = next((each for each in cases if each.name == "ddp-gloo"), None)
    work = n_ranks if scaling == "weak" else 1  # of all ranks, by that of the one
    return [_row(each, alone, compute, ddp, work, n_ranks) for each in cases]


def _row(
    of: Case,
    alone: Case,
    compute: Case,
    ddp: Case | None,
    work: int,
    n_ranks: int,
) -> Row:
    median = statistics.median
    own, base = _samples(of.iteration), _samples(compute.iteration)
    exchanges = _samples(of.exchanging)
    hidden = None
    if min(exchanges) > 0:
        rounds = zip(own, base, exchanges, strict=True)
        hidden = median(1 - (mine - least) / alone for mine, least, alone in rounds)
    if of is alone:
        speedup, n_ranks = 1.0, 1
    else:
        rounds_of_one = zip(_samples(alone.iteration), own, strict=True)
        speedup = median(work * one / mine for one, mine in rounds_of_one)
    relative = None
    if ddp is not None:
        theirs = _samples(ddp.iteration)
        relative = median(mine / other for mine, other in zip(own, theirs, strict=True))
    return Row(
        of.name,
        of.what,
        of.plan,
        iteration=median(own),
        exchange=median(exchanges),
        compute=median(base),
        hidden=hidden,
        communication=median(1 - least / mine for mine, least in zip(own, base, strict=True)),
        speedup=speedup,
        efficiency=speedup / n_ranks,
        relative=relative,
        samples=own,
        exchange_samples=exchanges,
    )


def _samples(contender: Contender) -> list[float]:
    """Return milliseconds, by round."""
    return [us / 1e3 for us in contender.samples().values]


def by_module(work: Workload, spans: Iterable[Span], iterations: int) -> list[LayerRow]:
    """Return the costs of each module, in the order of the forward pass."""
    found = {stage.name: LayerRow(stage.name, 0) for stage in work.forward}
    for key, count in zip(work.names, work.counts, strict=True):
        found[_module(key, found)].bytes += 4 * count
    exchanges: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        row = found.get(_module(span.name, found))
        if row is None:  # a bucket of all, say
            continue
        length = 1e3 * (span.end - span.begin)
        if span.track == "exchange":
            exchanges[row.name].append(length)
        elif span.track != "host":
            setattr(row, span.track, getattr(row, span.track) + length / iterations)
        elif span.name.startswith("wait "):
            row.waiting += length / iterations
    for name, lengths in exchanges.items():
        found[name].exchange = max(lengths)
    return list(found.values())


def _module(name: str, modules: Iterable[str]) -> str:
    """Return the module of a span or layer: spans have a word before, layers a name behind."""
    place = name.rsplit(" ", maxsplit=1)[-1]
    return place if place in modules else place.rpartition(".")[0]


def table(found: Sequence[Row]) -> list[str]:
    """Lay out a line for each variant."""
    width = max(len(row.name) for row in found)
    head = (
        f"{'ms':{width}} {'iteration':>9} {'exchange':>9} {'exposed':>9} {'hidden':>7} "
        f"{'communication':>13} {'speedup':>7} {'/ ddp-gloo':>10}  how"
    )
    lines = [head]
    for row in found:
        hidden = "" if row.hidden is None else f"{row.hidden:.1%}"
        exchange = "" if row.hidden is None else f"{row.exchange:.2f}"
        exposed = "" if row.hidden is None else f"{row.iteration - row.compute:.2f}"
        share = "" if row.hidden is None else f"{row.communication:.1%}"
        relative = "" if row.relative is None else f"{row.relative:.2f}"
        how = f"{row.what} ({row.plan})" if row.plan else row.what
        lines.append(
            f"{row.name:{width}} {row.iteration:9.2f} {exchange:>9} {exposed:>9} {hidden:>7} "
            f"{share:>13} {row.speedup:7.2f} {relative:>10}  {how}"
        )
    return lines


def layer_table(found: Row, n_largest: int) -> list[str]:
    """Lay out the largest modules of a variant, and the sum of the others."""
    largest = sorted(found.layers, key=lambda row: -row.bytes)[:n_largest]
    shown = [row for row in found.layers if row in largest]
    others = [row for row in found.layers if row not in largest]
    if others:
        rest = LayerRow(f"{len(others)} others", sum(row.bytes for row in others))
        for track in ("forward", "backward", "waiting"):
            setattr(rest, track, sum(getattr(row, track) for row in others))
        rest.exchange = max(row.exchange for row in others)
        shown.append(rest)
    width = max(len(row.name) for row in [*shown, LayerRow(found.name, 0)])
    lines = [
        f"{found.name:{width}} {'bytes':>11} {'forward':>9} {'backward':>9} {'exchange':>9} "
        f"{'waiting':>9}   ms, rank 0"
    ]
    lines += [
        f"{row.name:{width}} {row.bytes:11,} {row.forward:9.3f} {row.backward:9.3f} "
        f"{row.exchange:9.3f} {row.waiting:9.3f}"
        for row in shown
    ]
    return lines
