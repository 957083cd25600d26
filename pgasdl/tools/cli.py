"""The ``pgasdl`` command: its commands, and how they end."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem, shell_complete

from pgasdl.tools.command import USAGE_ERROR, ToolGroup, colour, complete, json_option
from pgasdl.tools.text import write_json

__all__ = ["USAGE_ERROR", "main", "package_version"]

_COMPLETE_VARIABLE = "_PGASDL_COMPLETE"
# Each command and its place: here, or in a module that is loaded on demand, because some need numpy
# and the native module.
_COMMANDS = {
    "run": ("pgasdl.tools.run_cli", "start N ranks of a program on this machine"),
    "env": ("", "list the PGASDL_* variables and their values"),
    "doctor": ("", "report what this machine offers, with fixes"),
    "topo": ("", "list GPUs and RDMA devices, the one used, and why not others"),
    "bench": ("pgasdl.tools.bench.cli", "measure, beside the machine's floor"),
    "tune": (
        "pgasdl.tools.bench.plans_cli",
        "measure this machine, and write which plan is best for what",
    ),
    "stage": ("pgasdl.tools.stage_cli", "bring a data set to this machine's disk"),
    "serve": ("pgasdl.tools.serve_cli", "queue, start and watch jobs of this machine"),
    "job": ("pgasdl.tools.job_cli", "submit, list, show, follow and stop jobs of a server"),
    "sim": (
        "pgasdl.simulate.cli",
        "simulate plans on modelled machines, and the papers' runs",
    ),
    "version": ("", "print the version"),
}


def main(arguments: Sequence[str] | None = None) -> int:  # noqa: PLR0911 - one for each end
    """Run the command line; return the exit status."""
    _complete_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if asked := os.environ.get(_COMPLETE_VARIABLE):
        return shell_complete(cli, {}, "pgasdl", _COMPLETE_VARIABLE, asked)
    try:
        with cli.make_context("pgasdl", words.copy(), color=colour()) as ctx:
            status = int(cli.invoke(ctx) or 0)
            sys.stdout.flush()
            return status
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        _drop_output()
        if error.errno == errno.EPIPE:
            return 141
        print(f"pgasdl: error: {error.strerror}", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """Drop output that was not written: Python would flush it once more when it ends."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complete_streams() -> None:
    """Open the null device for closed standard streams; else the next file gets their number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


class _Commands(ToolGroup):
    """All commands, loaded on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module, _ = _COMMANDS.get(cmd_name, ("", ""))
        if not module:
            return super().get_command(ctx, cmd_name)
        try:
            found: click.Command = importlib.import_module(module).command
        except ImportError as error:
            if ctx.resilient_parsing:  # a shell completes
                return None
            raise click.ClickException(
                f"{cmd_name} is not available: {error}; see `pgasdl doctor`"
            ) from error
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        options = click.Command.shell_complete(self, ctx, incomplete)
        names = complete(tuple(_COMMANDS), incomplete)
        return [CompletionItem(one.value, help=_COMMANDS[one.value][1]) for one in names] + options


def _print_version(ctx: click.Context) -> None:
    print(package_version())
    ctx.exit()


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog='Every table is also a JSON document: --json. Tab completes: eval "$(_PGASDL_COMPLETE='
    'bash_source pgasdl)"; or zsh_source; or _PGASDL_COMPLETE=fish_source pgasdl | source.',
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, _, given: _print_version(ctx) if given else None,
    help="Print the version.",
)
def cli() -> None:
    """One-sided communication for deep learning."""


@cli.command("env")
@json_option
def _env(as_json: bool) -> int:
    """List the PGASDL_* variables and their values."""
    from pgasdl.config import listing

    rows, problems = listing()
    table = [
        {"name": name, "value": value, "set": name in os.environ, "doc": doc}
        for name, value, doc in rows
    ]
    if as_json:
        write_json({"variables": table, "problems": problems})
    else:
        width = max(len(name) for name, _, _ in rows)
        values = max(len(value) for _, value, _ in rows)
        for name, value, doc in rows:
            mark = "*" if name in os.environ else " "
            print(f"{mark} {name:<{width}}  {value:<{min(values, 40)}}  {doc}")
        print("\n* set in the environment; others show their default")
    for problem in problems:
        click.echo(f"pgasdl env: {click.style(problem, fg='red')}", err=True)
    return 1 if problems else 0


@cli.command("doctor")
@json_option
def _doctor(as_json: bool) -> int:
    """Report what this machine offers, by trying it, with fixes."""
    from pgasdl.tools.doctor import main as diagnose

    return diagnose(as_json)


@cli.command("topo")
@json_option
def _topo(as_json: bool) -> None:
    """List GPUs and RDMA devices, the one used, and why not others."""
    from pgasdl.tools.topo import main as survey

    survey(as_json)


@cli.command("version")
def _version() -> None:
    """Print the version."""
    print(package_version())


def package_version() -> str:
    """Return the installed package's version."""
    import importlib.metadata  # takes as long as all of click

    try:
        return importlib.metadata.version("pgasdl")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"
