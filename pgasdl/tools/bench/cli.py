"""The commands of ``pgasdl bench``; they start the ranks and end with them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import click

from pgasdl import models
from pgasdl.errors import ConfigError
from pgasdl.plans import PLANS
from pgasdl.tools.bench.options import check_rounds, seconds_option, transport_option
from pgasdl.tools.bench.plans_cli import plans_command
from pgasdl.tools.bench.request import DEFAULT_SIZES, Request
from pgasdl.tools.bench.starting import start
from pgasdl.tools.command import Function, Names, ToolGroup, json_option
from pgasdl.tools.text import ALL, parse_size, parse_sizes
from pgasdl.transports import OF_THREADS

_HELP = """\
Measures on this machine, and prints a table: the median time of ours, the physical floor measured
by the same program in between, and their ratio. Times are microseconds; write_notify is one way,
half a round trip. Every rank's data is new in every call.
"""
_OPERATIONS = {
    "write_notify": "a notified write, from the core and from Python",
    "allreduce": "mean of float32 over all ranks: in segments, and of arrays outside",
    "model": "one iteration's gradients of a network, layer by layer",
    "c10d": "collectives of torch.distributed over backend pgasdl beside gloo, in the same ranks",
}
_LARGEST = 16
_MPIS = ("any", "mpich", "openmpi")


@click.group("bench", cls=ToolGroup, help=_HELP)
def command() -> None:
    """Group the operations."""


def _options(op: str) -> Callable[[Function], Function]:
    """Add an operation's options, which :func:`_request` takes."""
    found: list[Callable[..., Any]] = [
        click.option(
            "-n", "n_ranks", type=int, default=2, show_default=True, metavar="N", help="Ranks."
        ),
        transport_option("auto"),
        click.option(
            "--mpi",
            default="any",
            type=Names(_MPIS, "MPI"),
            show_default=True,
            metavar=f"[{'|'.join(_MPIS)}]",
            help="MPI of transport mpi; any: the first that is here.",
        ),
        click.option(
            "--plan",
            type=Names(sorted(PLANS), "plan"),
            metavar="P",
            help="Name of a plan (chosen by size).",
        ),
    ]
    if op == "model":
        found += [
            click.argument(
                "names",
                default=ALL,
                metavar="[MODELS]",
                type=Names(models.NAMES, "model", several=True),
            ),
            click.option(
                "--bucket-bytes",
                default="0",
                show_default=True,
                metavar="SIZE",
                help="Put layers together up to this; 0: each alone.",
            ),
        ]
    else:
        found.append(
            click.option(
                "--sizes",
                default=DEFAULT_SIZES[op],
                show_default=True,
                metavar="LIST",
                help="Bytes.",
            )
        )
    found += [
        click.option(
            "--repeat", type=int, default=10, show_default=True, metavar="R", help="Rounds."
        ),
        seconds_option,
        json_option,
    ]

    def add(function: Function) -> Function:
        for option in reversed(found):
            function = option(function)
        return function

    return add


def _add(op: str) -> None:
    about = _OPERATIONS[op]
    about = about[0].upper() + about[1:] + "."
    if op == "model":
        about += f" MODELS are {', '.join(models.NAMES)}, by commas, or all, which is the default."

    @command.command(
        op,
        help=about,
        short_help=_OPERATIONS[op],
    )
    @_options(op)
    def _(mpi: str, **given: Any) -> int:
        return start(_request(op, **given), mpi)


for _op in _OPERATIONS:
    _add(_op)
command.add_command(plans_command)


def _request(
    op: str,
    *,
    n_ranks: int,
    transport: str,
    plan: str | None,
    repeat: int,
    seconds: float,
    as_json: bool,
    sizes: str = "",
    names: tuple[str, ...] = (),
    bucket_bytes: str = "0",
) -> Request:
    """Check the options; ConfigError names a wrong one."""
    if not 1 <= n_ranks <= _LARGEST:
        raise ConfigError(f"-n {n_ranks}: 1 to {_LARGEST} ranks of one machine")
    if op in ("write_notify", "c10d") and n_ranks < 2:
        raise ConfigError(f"{op} is measured between two ranks: -n 2")
    if op == "c10d" and importlib.util.find_spec("torch") is None:
        raise ConfigError("c10d is measured in PyTorch, which is not installed: pip install torch")
    if op == "c10d" and transport == OF_THREADS:
        raise ConfigError(f"torch.distributed's ranks are processes: no transport {OF_THREADS}")
    check_rounds(repeat, seconds)
    return Request(
        op=op,
        ranks=n_ranks,
        transport=transport,
        plan=plan,
        sizes=parse_sizes(sizes, 4 if op == "allreduce" else 1) if sizes else (),
        models=names,
        bucket_bytes=0 if bucket_bytes == "0" else parse_size(bucket_bytes),
        rounds=repeat,
        seconds=seconds,
        as_json=as_json,
    )
