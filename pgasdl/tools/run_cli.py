"""``pgasdl run``: its options, and the cut between them and the program."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import click

from pgasdl.errors import ConfigError
from pgasdl.runtime.launch import mpiexec
from pgasdl.tools.command import Names, ToolCommand, complete
from pgasdl.transports import SETTINGS

_HELP = """\
Start N ranks of a Python program on this machine and end with the status of the first that
fails (128 + the signal's number if it was killed). Everything from the program on is the
program's own. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 go to all ranks; standard input goes to
rank 0.
"""
_PROGRAM = "(PROGRAM.py | -m MODULE | -c CODE) [ARGUMENTS]..."
_VALUE_OPTIONS = ("-n", "--transport", "--timeout", "--grace")


def split_program(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut the options of ``run`` from the program and its arguments, which stay as they are.

    The word after ``--mpi`` is its value if it names an MPI; else it is the program.
    """
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        if argument == "--":
            return list(arguments[:index]), list(arguments[index + 1 :])
        if argument in ("-m", "-c") or not argument.startswith("-"):
            break
        follows = arguments[index + 1] if index + 1 < len(arguments) else ""
        valued = mpiexec.is_named(follows) if argument == "--mpi" else argument in _VALUE_OPTIONS
        index += 2 if valued else 1
    return list(arguments[:index]), list(arguments[index:])


class _Run(ToolCommand):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options, program = split_program(args)
        return super().parse_args(ctx, [*options, *(["--", *program] if program else [])])


@click.command("run", cls=_Run, help=_HELP)
@click.option("-n", "n_ranks", type=int, required=True, metavar="N", help="Ranks.")
@click.option(
    "--transport",
    type=Names(SETTINGS, "transport"),
    metavar="T",
    help=f"PGASDL_TRANSPORT of the ranks: {', '.join(SETTINGS)}.",
)
@click.option(
    "--mpi",
    is_flag=False,
    flag_value="any",
    metavar="[KIND]",
    shell_complete=lambda _, __, word: complete((*mpiexec.LAUNCHERS, "any"), word),
    help="By MPI's launcher: mpich, openmpi, or the path of one (without: the first that is here); "
    "transport mpi unless --transport names another.",
)
@click.option("--timeout", metavar="S", help="PGASDL_TIMEOUT of the ranks, seconds.")
@click.option(
    "--grace",
    type=float,
    default=5.0,
    show_default=True,
    metavar="S",
    help="Seconds from SIGTERM to SIGKILL.",
)
@click.option(
    "--keep-going",
    is_flag=True,
    help="When a rank fails leave the others alone: they may survive it (ctx.survivors).",
)
@click.option("--no-prefix", is_flag=True, help="No [rank] before each line of output.")
@click.argument("program", nargs=-1, type=click.Path(), metavar=_PROGRAM)
def command(
    n_ranks: int,
    transport: str | None,
    mpi: str | None,
    timeout: str | None,
    grace: float,
    keep_going: bool,
    no_prefix: bool,
    program: tuple[str, ...],
) -> int:
    """Start the job; return its status."""
    # Here, not at the top: help and completion need neither sockets nor processes.
    from pgasdl.runtime.launch.run import LocalJob, check, inherited, run

    environ = inherited()
    if transport is not None:
        environ["PGASDL_TRANSPORT"] = transport
    if timeout is not None:
        environ["PGASDL_TIMEOUT"] = timeout
    if not 0 <= grace <= 3600:
        raise ConfigError(f"--grace {grace}: seconds, from 0 to 3600")
    job = LocalJob(program, n_ranks, environ, not no_prefix, grace, keep_going)
    if mpi is not None and job != LocalJob(program, n_ranks, environ):
        raise ConfigError("--mpi: its launcher has no --grace, --keep-going or --no-prefix")
    if mpi == "any":
        _require_program(program)
    config = check(job)
    if mpi is not None:
        found = mpiexec.find_any() if mpi == "any" else mpiexec.find(mpi)
        environ.setdefault("PGASDL_TRANSPORT", "mpi")
        mpiexec.run(found, n_ranks, program, environ)
    logging.basicConfig(level=config.log.upper(), format="%(name)s: %(message)s")
    return run(job)


def _require_program(program: Sequence[str]) -> None:
    """Refuse a program that does not exist: it may be a misspelt MPI."""
    word = program[0] if program else ""
    if word and not word.startswith("-") and not os.path.exists(word):
        raise ConfigError(
            f"--mpi {word}: neither an MPI ({', '.join(mpiexec.LAUNCHERS)}, or the path of a "
            "launcher) nor a program"
        )
