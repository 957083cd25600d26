"""The options of ``pgasdl bench``; it starts the ranks itself and ends when they have."""

from __future__ import annotations

import argparse
import math
import os
import sys

from pgasdl.errors import ConfigError
from pgasdl.plans import PLANS
from pgasdl.tools.bench.plans_cli import add_plans
from pgasdl.tools.bench.request import (
    DEFAULT_SIZES,
    PEERS,
    Request,
    model_names,
)
from pgasdl.tools.sizes import parse_names, parse_size, parse_sizes
from pgasdl.transports import SETTINGS

_DESCRIPTION = """\
Measures on this machine, and prints a table: the median time of ours, the physical floor measured
by the same program in between, their ratio, and the peers that are installed (--peers). Times are
microseconds; write_notify is one way, half a round trip. Every rank's data is new in every call.
"""
_HELP = {
    "write_notify": "a notified write, from the core and from Python",
    "allreduce": "mean of float32 over all ranks: in segments, and of arrays outside",
    "model": "one iteration's gradients of a network, layer by layer",
    "rdma": "notified writes over verbs beside perftest's ib_write_lat and ib_write_bw",
    "mpi": "transport mpi beside mpi4py's put + flush + flag and Allreduce, in the same ranks",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the operations and their options."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    operations = parser.add_subparsers(dest="op", required=True, metavar="OP")
    for op, text in _HELP.items():
        one = operations.add_parser(op, help=text, allow_abbrev=False)
        one.add_argument("-n", dest="n_ranks", type=int, default=2, metavar="N", help="ranks (2)")
        usual = {"rdma": "verbs", "mpi": "mpi"}.get(op, "auto")
        one.add_argument("--transport", default=usual, choices=SETTINGS, help=f"({usual})")
        one.add_argument("--mpi", default="any", choices=("any", "mpich", "openmpi"),
                         help="MPI of transport mpi (the first that is here)")  # fmt: skip
        one.add_argument("--plan", metavar="P", help="name of a plan (chosen by size)")
        if op == "model":
            one.add_argument("models", nargs="?", default="all", metavar="MODELS",
                             help="e.g. resnet50,vgg16 (all)")  # fmt: skip
            one.add_argument("--bucket-bytes", default="0", metavar="SIZE",
                             help="put layers together up to this (0: each alone)")  # fmt: skip
        else:
            one.add_argument("--sizes", default=DEFAULT_SIZES[op], metavar="LIST",
                             help=f"bytes ({DEFAULT_SIZES[op]})")  # fmt: skip
        one.add_argument("--repeat", type=int, default=10, metavar="R", help="rounds (10)")
        one.add_argument("--seconds", type=float, default=0.02, metavar="S",
                         help="of one turn in a round, about (0.02)")  # fmt: skip
        one.add_argument("--peers", nargs="?", const="all", metavar="LIST",
                         help=f"measure others too: {', '.join(PEERS)} (all)")  # fmt: skip
        one.add_argument("--json", metavar="FILE", help="write the rows there as well")
    plans = operations.add_parser(
        "plans",
        help="every plan beside its predicted time, and the tuner's choice",
        allow_abbrev=False,
    )
    parser.set_defaults(handler=run)
    add_plans(plans)


def request_of(given: argparse.Namespace) -> Request:
    """Check the options.

    Raises
    ------
    ConfigError
        Names the option that cannot be.
    """
    if not 1 <= given.n_ranks <= 16:
        raise ConfigError(f"-n {given.n_ranks}: 1 to 16 ranks of one machine")
    if given.op == "write_notify" and given.n_ranks < 2:
        raise ConfigError("write_notify is measured between two ranks: -n 2")
    if given.plan is not None and given.plan not in PLANS:
        raise ConfigError(f"--plan {given.plan}: there are {', '.join(sorted(PLANS))}")
    if not 1 <= given.repeat <= 10_000:
        raise ConfigError(f"--repeat {given.repeat}: 1 to 10000 rounds")
    if not (math.isfinite(given.seconds) and 0 < given.seconds <= 3600):
        raise ConfigError(f"--seconds {given.seconds}: more than 0, at most 3600")
    if given.json is not None and not os.path.isdir(os.path.dirname(given.json) or "."):
        raise ConfigError(f"--json {given.json}: no such directory")
    is_model = given.op == "model"
    bucket = getattr(given, "bucket_bytes", "0")
    return Request(
        op=given.op,
        ranks=given.n_ranks,
        transport=given.transport,
        plan=given.plan,
        sizes=() if is_model else parse_sizes(given.sizes, 4 if given.op == "allreduce" else 1),
        models=model_names(given.models) if is_model else (),
        bucket_bytes=0 if bucket == "0" else parse_size(bucket),
        rounds=given.repeat,
        seconds=given.seconds,
        peers=() if given.peers is None else parse_names(given.peers, PEERS, "peer"),
        json_file=None if given.json is None else os.path.abspath(given.json),
    )


def run(given: argparse.Namespace) -> int:
    """Measure; returns the exit status."""
    request = request_of(given)
    if request.transport == "loopback":
        from pgasdl import loopback
        from pgasdl.tools.bench.worker import measure

        loopback.run(request.ranks, lambda context: measure(context, request))
        return 0
    from pgasdl.runtime.launch.run import Job, run

    environ = dict(os.environ)
    for name in ("PGASDL_RANK", "PGASDL_LOCAL_RANK", "PGASDL_SECRET_FD"):
        environ.pop(name, None)  # of a job that this one is started from
    environ["PGASDL_TRANSPORT"] = request.transport
    environ.setdefault("PGASDL_LOG", "warning")  # the header says it
    sys.stdout.flush()
    program = ["-P", "-m", "pgasdl.tools.bench.worker", request.dump()]
    if request.transport == "mpi":
        from pgasdl.runtime.launch import mpiexec

        found = mpiexec.find_any() if given.mpi == "any" else mpiexec.find(given.mpi)
        mpiexec.run(found, request.ranks, program, environ)
    return run(Job(program, request.ranks, environ, prefix=False))
