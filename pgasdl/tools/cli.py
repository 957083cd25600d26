"""The ``pgasdl`` command: run, env, doctor, topo, bench, tune, sim, version."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence

from pgasdl.errors import ConfigError, PgasError

USAGE_ERROR = 2

Handler = Callable[[argparse.Namespace], int]

_RUN_DESCRIPTION = """\
Start N ranks of a Python program on this machine and end with the status of the first that
fails (128 + the signal's number if it was killed). Everything from the program on is the
program's own. Signals go to all ranks; standard input goes to rank 0.
"""
_RUN_USAGE = """\
pgasdl run -n N [--mpi [KIND]] [options] (PROGRAM.py | -m MODULE | -c CODE) [arguments ...]"""
_VALUE_OPTIONS = ("-n", "--transport", "--timeout", "--grace")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    program: list[str] = []
    if given[:1] == ["run"]:
        options, program = split_program(given[1:])
        given = ["run", *options]
    parsed = _parser(given[0] if given else "").parse_args(given)
    parsed.program = program
    handler: Handler = parsed.handler
    try:
        return handler(parsed)
    except ConfigError as error:
        print(f"pgasdl {parsed.command}: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except PgasError as error:
        print(f"pgasdl {parsed.command}: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Python flushes standard output once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def split_program(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut ``run``'s own options from the program and its arguments, which stay as they are.

    The word after ``--mpi`` is its value if it names an MPI, else what follows is the program.
    """
    from pgasdl.runtime.launch import mpiexec

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


def _parser(asked: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pgasdl",
        description="One-sided communication for deep learning.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="start N ranks of a program on this machine",
        usage=_RUN_USAGE,
        description=_RUN_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument("-n", dest="n_ranks", type=int, required=True, metavar="N", help="ranks")
    run.add_argument("--transport", metavar="T", help="PGASDL_TRANSPORT of the ranks")
    run.add_argument(
        "--mpi", nargs="?", const="any", metavar="KIND",
        help="by MPI's launcher: mpich, openmpi, or the path of one (without: the first that is "
        "here); transport mpi unless --transport names another",
    )  # fmt: skip
    run.add_argument("--timeout", metavar="S", help="PGASDL_TIMEOUT of the ranks, seconds")
    run.add_argument(
        "--grace", type=float, default=5.0, metavar="S", help="seconds from SIGTERM to SIGKILL (5)"
    )
    run.add_argument(
        "--keep-going", action="store_true",
        help="when a rank fails leave the others alone: they may survive it (ctx.survivors)",
    )  # fmt: skip
    run.add_argument(
        "--no-prefix", action="store_true", help="no [rank] before each line of output"
    )
    run.set_defaults(handler=_run)

    env = commands.add_parser("env", help="list the PGASDL_* variables and their values")
    env.add_argument("--json", action="store_true", help="as JSON")
    env.set_defaults(handler=_env)

    doctor = commands.add_parser("doctor", help="report what this machine offers, with fixes")
    doctor.add_argument("--json", action="store_true", help="as JSON")
    doctor.set_defaults(handler=_doctor)

    topo = commands.add_parser("topo", help="list RDMA devices, the one used, and why not others")
    topo.add_argument("--json", action="store_true", help="as JSON")
    topo.set_defaults(handler=_topo)

    for name, (module, text) in _OTHERS.items():
        command = commands.add_parser(name, help=text)
        command.set_defaults(handler=_not_available)
        if asked == name:
            _configure(command, module)

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(handler=_version)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    # Here, not at the top: the other commands need neither sockets nor processes.
    from pgasdl.runtime.launch.run import Job, check, run

    environ = dict(os.environ)
    for name in ("PGASDL_RANK", "PGASDL_LOCAL_RANK", "PGASDL_SECRET_FD"):
        environ.pop(name, None)  # of a job that this one is started from
    if arguments.transport is not None:
        environ["PGASDL_TRANSPORT"] = arguments.transport
    if arguments.timeout is not None:
        environ["PGASDL_TIMEOUT"] = arguments.timeout
    if not 0 <= arguments.grace <= 3600:
        raise ConfigError(f"--grace {arguments.grace}: seconds, from 0 to 3600")
    job = Job(
        arguments.program,
        arguments.n_ranks,
        environ,
        not arguments.no_prefix,
        arguments.grace,
        arguments.keep_going,
    )
    if arguments.mpi == "any":
        _require_program(arguments.program)
    config = check(job)
    if arguments.mpi is not None:
        _become_mpiexec(arguments, environ)
    logging.basicConfig(level=config.log.upper(), format="%(name)s: %(message)s")
    return run(job)


def _require_program(program: Sequence[str]) -> None:
    """Of the word after ``--mpi``, which may have been meant to name an MPI."""
    from pgasdl.runtime.launch.mpiexec import LAUNCHERS

    word = program[0] if program else ""
    if word and not word.startswith("-") and not os.path.exists(word):
        raise ConfigError(
            f"--mpi {word}: neither an MPI ({', '.join(LAUNCHERS)}, or the path of a launcher) nor "
            "a program"
        )


def _become_mpiexec(arguments: argparse.Namespace, environ: dict[str, str]) -> None:
    from pgasdl.runtime.launch import mpiexec

    found = mpiexec.find_any() if arguments.mpi == "any" else mpiexec.find(arguments.mpi)
    environ.setdefault("PGASDL_TRANSPORT", "mpi")
    mpiexec.run(found, arguments.n_ranks, arguments.program, environ)


def _env(arguments: argparse.Namespace) -> int:
    from pgasdl.config import listing

    rows, problems = listing()
    if arguments.json:
        table = [
            {"name": name, "value": value, "set": name in os.environ, "doc": doc}
            for name, value, doc in rows
        ]
        print(json.dumps({"variables": table, "problems": problems}, indent=2))
    else:
        width = max(len(name) for name, _, _ in rows)
        values = max(len(value) for _, value, _ in rows)
        for name, value, doc in rows:
            mark = "*" if name in os.environ else " "
            print(f"{mark} {name:<{width}}  {value:<{min(values, 40)}}  {doc}")
        print("\n* set in the environment; others show their default")
    for problem in problems:
        print(f"pgasdl env: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _doctor(arguments: argparse.Namespace) -> int:
    from pgasdl.tools.doctor import main as diagnose

    return diagnose(as_json=arguments.json)


def _topo(arguments: argparse.Namespace) -> int:
    from pgasdl.tools.topo import main as survey

    return survey(as_json=arguments.json)


# Commands with options of their own; loaded late, for they need numpy and the native module.
_OTHERS = {
    "bench": ("pgasdl.tools.bench.cli", "measure, beside the machine's floor and its peers"),
    "sim": (
        "pgasdl.tools.simulate.cli",
        "simulate plans on modelled machines, and the papers' runs",
    ),
    "tune": (
        "pgasdl.tools.bench.plans_cli",
        "measure this machine, and write which plan is best for what",
    ),
}


def _configure(parser: argparse.ArgumentParser, module: str) -> None:
    """Add a command's own options."""
    try:
        configure = importlib.import_module(module).configure
    except ImportError as error:
        parser.set_defaults(reason=str(error))
        return
    configure(parser)


def _not_available(arguments: argparse.Namespace) -> int:
    reason = getattr(arguments, "reason", "not loaded")
    print(f"pgasdl {arguments.command}: not available: {reason}", file=sys.stderr)
    return 1


def _version(_: argparse.Namespace) -> int:
    print(package_version())
    return 0


def package_version() -> str:
    """Return the installed package's version."""
    try:
        return importlib.metadata.version("pgasdl")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"
