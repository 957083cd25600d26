"""Measure pgasdl beside other libraries, in turns: MPICH, Open MPI, gloo, perftest.

    pgasdl run -n 2 apps/peers_bench.py allreduce --sizes 8,1K,1M --peers mpich,gloo
    pgasdl run -n 2 apps/peers_bench.py model resnet50
    pgasdl run -n 2 --mpi=mpich apps/peers_bench.py mpi
    pgasdl run -n 2 --transport verbs apps/peers_bench.py rdma
    pgasdl run -n 2 apps/peers_bench.py product --sizes 512,2048 --repeat 5
    pgasdl run -n 2 apps/peers_bench.py remap

``write_notify``, collectives and ``model`` run each library in a job of its own, which rank 0
asks in its turn; of a library the best of its variants is shown, beside the physical floor where
ranks map each other's memory. ``mpi``
measures transport mpi and mpi4py's own calls in the same ranks, ``rdma`` transport verbs and
perftest on the same device. ``product`` and ``remap`` are of square matrices of float32: beside one
process's BLAS with a thread for each rank; beside a copy of as many bytes, and ``MPI_Alltoallw``.
Times are microseconds; those of writes are one way.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bench.comparison import Comparison, Groups, asked
from bench.cuts import DDP, buckets, pieces
from bench.jobs import PEER_KINDS, Peer, serving, start
from bench.matrices import Matrices

import pgasdl
from pgasdl import models
from pgasdl.errors import ConfigError
from pgasdl.tools.bench.floors import Floors
from pgasdl.tools.bench.options import check_rounds
from pgasdl.tools.bench.ours import Ours
from pgasdl.tools.bench.output import Output
from pgasdl.tools.bench.session import Session
from pgasdl.tools.bench.turns import PATIENCE, Contender
from pgasdl.tools.text import parse_names, parse_sizes

SIZES = {
    "write_notify": "8,1K,16K,256K,4M",
    "allreduce": "8,1K,16K,256K,1M,4M,16M,64M,256M",
    "reduce": "8,1K,16K,256K,1M,4M,16M,64M",
    "broadcast": "8,1K,16K,256K,1M,4M,16M,64M",
    "model": "8",
    "mpi": "8,4K,64K,1M,4M,16M",
    "rdma": "8,4K,64K,1M",
    "product": "512,1024,2048,4096",
    "remap": "64,256,1024,2048,4096",
}
_MATRICES = ("product", "remap")
_ROOTED = ("reduce", "broadcast")
_JOBS = ("write_notify", "allreduce", *_ROOTED, "model")


class Beside:
    """Ours, its floor and the jobs of other libraries. Every member is collective."""

    def __init__(
        self, session: Session, floors: Floors | None, peers: Sequence[Peer], plan: str | None
    ) -> None:
        self._context, self._ranks = session.context, session.ranks
        self._floors, self._ours = floors, Ours(session, plan)
        mine = ",".join(f"{peer.name}:{'+'.join(peer.ways)}" for peer in peers)
        known = session.context.world.allgather("peers", mine.encode(), PATIENCE)[0].decode()
        self._ways = {name: ways.split("+") for name, _, ways in
                      (word.partition(":") for word in filter(None, known.split(",")))}  # fmt: skip
        self._peers = {peer.name: peer for peer in peers}

    def writes(self, nbytes: int) -> tuple[Groups, Callable[[], None]]:
        """Return the contenders of a notified write, and a function that frees their memory."""
        (core, python), free = self._ours.notified_writes(nbytes)
        ours = {"core": [core], "python": [python]}
        if self._floors is not None:
            ours["floor"] = self._floors.puts(nbytes)
        asks = {
            name: {way: partial(Peer.ping, way=way, nbytes=nbytes) for way in ways}
            for name, ways in self._ways.items()
        }
        return ours | self._others(asks), free

    def allreduce(self, nbytes: int) -> tuple[Groups, Callable[[], None]]:
        """Return the contenders of an allreduce: in segments, and of arrays outside."""
        count = nbytes // 4
        handle, plan, free = self._ours.handle(count)
        array, fill_ns = self._ours.array(count)
        handle.name, array.name = plan, ""
        ours = {"segment": [handle], "array": [array]}
        if self._floors is not None:
            ours["its floor"] = self._floors.layers([count])
            ours["array's floor"] = self._floors.private_arrays(count, fill_ns)
        cuts = {"": [count]} | ({"4 MB pieces": cut} if len(cut := pieces(count)) > 1 else {})
        return ours | self._calls(cuts), free

    def rooted(self, what: str, nbytes: int) -> tuple[Groups, Callable[[], None]]:
        """Return the contenders of a reduce to rank 0, or a broadcast from it, in segments."""
        count = nbytes // 4
        one, free = self._ours.rooted(what, count)
        return {"pgasdl": [one]} | self._calls({"": [count]}, what), free

    def model(self, name: str) -> tuple[Groups, Callable[[], None]]:
        """Return the contenders of one iteration's gradients of a network."""
        counts = models.layers(name)
        exchange, plan, free = self._ours.model(counts, 0)
        exchange.name = f"layers, {plan}"
        cuts = {
            "layers": list(counts),
            "DDP's buckets": [sum(counts[n] for n in layers) for layers in buckets(counts, DDP)],
            "4 MB pieces": pieces(sum(counts)),
            "fused": [sum(counts)],
        }
        ours = {"pgasdl": [exchange]}
        if self._floors is not None:
            ours["floor"] = self._floors.layers(counts)
        return ours | self._calls(cuts), free

    def _calls(self, cuts: dict[str, list[int]], what: str = "allreduce") -> Groups:
        ranks = self._ranks
        common = {"paced": ranks.paced, "fill_share": ranks.fill_share}
        asks = {
            how: partial(Peer.collective, what=what, cuts=cut, **common)
            for how, cut in cuts.items()
        }
        return self._others(dict.fromkeys(self._ways, asks))

    def _others(self, asks: dict[str, dict[str, Callable[..., list[float]]]]) -> Groups:
        """Group what peers are asked for by their libraries; a variant's name has both."""
        groups: dict[str, list[Contender]] = {}
        for name, variants in asks.items():
            library, _, variant = name.partition("-")
            for how, ask in variants.items():
                peer = self._peers.get(name)  # None: this is not rank 0
                ours = None if peer is None else lambda n, peer=peer, ask=ask: ask(peer, calls=n)
                label = " ".join(filter(None, (variant, how)))
                one = Contender(label, asked(self._context, ours))
                groups.setdefault(library, []).append(one)
        return groups


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and refuse what cannot be measured."""
    parser = argparse.ArgumentParser(description="Measure pgasdl beside other libraries.")
    add = parser.add_argument
    add("op", choices=SIZES)
    add("models", nargs="?", default="all", help=f"{', '.join(models.NAMES)}, by commas, or all")
    add("--sizes", help=f"bytes, such as {SIZES['mpi']}; of matrices the edge")
    add("--peers", default="all", help=f"{', '.join(PEER_KINDS)}, by commas, or all that have it")
    add("--plan", help="name of a plan; without it, chosen by size")
    add("--repeat", type=int, default=10, help="rounds")
    add("--seconds", type=float, default=0.02, help="length of one turn in a round, about")
    add("--json", action="store_true", help="only one JSON document")
    given = parser.parse_args(arguments)
    try:
        check_rounds(given.repeat, given.seconds)
        given.sizes = parse_sizes(
            given.sizes or SIZES[given.op], 4 if given.op in ("allreduce", *_ROOTED) else 1
        )
        given.peers = parse_names(given.peers, serving(given.op), "peer")
        given.models = parse_names(given.models, models.NAMES, "model")
    except ConfigError as error:
        parser.error(str(error))
    return given


def payload(given: argparse.Namespace) -> int:
    """Return the bytes that the floor exchanges at most."""
    if given.op == "model":
        return max(sum(-(-n // 16) * 64 for n in models.layers(name)) for name in given.models)
    return 2 * max(-(-size // 4096) * 4096 for size in given.sizes)


def beside_jobs(ctx: pgasdl.Context, given: argparse.Namespace, output: Output) -> None:
    """Measure beside jobs of other libraries."""
    # They start before the ranks are pinned, which they would inherit.
    started, missing = start(given.peers, ctx.size) if ctx.rank == 0 else ([], [])
    with contextlib.ExitStack() as stack:
        for peer in started:
            stack.callback(peer.close)
        ctx.barrier(timeout=PATIENCE)
        most = 4096 if given.op in _MATRICES else payload(given)
        session = Session(ctx, output, rounds=given.repeat, seconds=given.seconds, payload=most)
        session.header(f"beside others: {given.op}")
        for peer in started:
            session.say(f"peer       {peer.name}: {peer.version}")
        for reason in missing:
            output.warn(f"no peer    {reason}")
        comparison = Comparison(session)
        comparison.begin()
        if given.op in _MATRICES:
            compare_matrices(session, started, comparison, given)
        else:
            compare_exchanges(session, started, comparison, given)
        comparison.end()


def compare_matrices(
    session: Session, peers: Sequence[Peer], comparison: Comparison, given: argparse.Namespace
) -> None:
    """Measure products or remaps of each size."""
    matrices = Matrices(session, peers, max(given.sizes))
    for n in given.sizes:
        comparison.measure(given.op, 4 * n * n, getattr(matrices, given.op)(n))


def compare_exchanges(
    session: Session, peers: Sequence[Peer], comparison: Comparison, given: argparse.Namespace
) -> None:
    """Measure writes, collectives or the gradients of networks."""
    beside = Beside(session, session.floors, peers, given.plan)
    if given.op == "model":
        for name in given.models:
            groups, free = beside.model(name)
            comparison.measure(name, 4 * sum(models.layers(name)), groups)
            free()
        return
    make = beside.writes if given.op == "write_notify" else beside.allreduce
    if given.op in _ROOTED:
        make = partial(beside.rooted, given.op)
    for nbytes in given.sizes:
        groups, free = make(nbytes)
        comparison.measure(given.op, nbytes, groups)
        free()


def beside_calls(ctx: pgasdl.Context, given: argparse.Namespace, output: Output) -> None:
    """Measure beside mpi4py in the same ranks, or perftest on the same device."""
    session = Session(ctx, output, rounds=given.repeat, seconds=given.seconds, pinned=False)
    session.header(f"beside others: {given.op}")
    comparison = Comparison(session)
    one: Any
    if given.op == "mpi":
        from bench.peers.same_ranks import SameRanks  # not without mpi4py

        one = SameRanks(session, comparison, given.plan)
    else:
        from bench.peers.perftest import OnDevice

        one = OnDevice(session, comparison)
    comparison.begin()
    for nbytes in given.sizes:
        one.size(nbytes)
    one.close()
    comparison.end()


def main() -> None:
    """Join the job and measure."""
    given = options()
    with pgasdl.init() as ctx:
        output = Output(ctx.rank, as_json=given.json)
        (beside_jobs if given.op in (*_JOBS, *_MATRICES) else beside_calls)(ctx, given, output)


if __name__ == "__main__":
    main()
