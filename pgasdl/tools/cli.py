"""The ``pgasdl`` command: run, env, doctor, topo, bench, tune, sim, version, completion."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click
from click.shell_completion import (
    CompletionItem,
    get_completion_class,
    shell_complete,
)

from pgasdl.tools.command import (
    USAGE_ERROR,
    Failed,
    Group,
    Names,
    colour,
    complete,
    json_option,
    report,
)
from pgasdl.tools.json_document import takes_stdout, write_json

__all__ = ["USAGE_ERROR", "main", "package_version"]

SHELLS = ("bash", "zsh", "fish")
_COMPLETE_VARIABLE = "_PGASDL_COMPLETE"
_COMPLETION_HELP = """\
Print a script with which a shell completes this command, its options and their values.

\b
  bash: eval "$(pgasdl completion bash)"      in ~/.bashrc
  zsh:  eval "$(pgasdl completion zsh)"       in ~/.zshrc, after compinit
  fish: pgasdl completion fish > ~/.config/fish/completions/pgasdl.fish
"""
# Each command and its place: here, or in a module that is loaded on demand, because some need numpy
# and the native module.
_COMMANDS = {
    "run": ("pgasdl.tools.run_cli", "start N ranks of a program on this machine"),
    "env": ("", "list the PGASDL_* variables and their values"),
    "doctor": ("", "report what this machine offers, with fixes"),
    "topo": ("", "list GPUs and RDMA devices, the one used, and why not others"),
    "bench": ("pgasdl.tools.bench.cli", "measure, beside the machine's floor and its peers"),
    "tune": (
        "pgasdl.tools.bench.plans_cli",
        "measure this machine, and write which plan is best for what",
    ),
    "sim": (
        "pgasdl.tools.simulate.cli",
        "simulate plans on modelled machines, and the papers' runs",
    ),
    "version": ("", "print the version"),
    "completion": ("", "print what makes a shell complete this command"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
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
        return report(error, words)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Python flushes standard output once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


class _Commands(Group):
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
            raise Failed(
                f"{cmd_name} is not available: {error}; see `pgasdl doctor`", ctx
            ) from error
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        options = click.Command.shell_complete(self, ctx, incomplete)
        names = complete(tuple(_COMMANDS), incomplete)
        return [CompletionItem(one.value, help=_COMMANDS[one.value][1]) for one in names] + options


@click.group(
    cls=_Commands,
    example="pgasdl run -n 2 train.py",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every table is also a JSON document: --json. Tab completes, after what `pgasdl "
    "completion --help` shows.",
)
def cli() -> None:
    """One-sided communication for deep learning."""


@cli.command("env", example="pgasdl env")
@json_option
def _env(json_file: str | None) -> int:
    """List the PGASDL_* variables and their values."""
    from pgasdl.config import listing

    rows, problems = listing()
    table = [
        {"name": name, "value": value, "set": name in os.environ, "doc": doc}
        for name, value, doc in rows
    ]
    write_json({"variables": table, "problems": problems}, json_file)
    if not takes_stdout(json_file):
        width = max(len(name) for name, _, _ in rows)
        values = max(len(value) for _, value, _ in rows)
        for name, value, doc in rows:
            mark = "*" if name in os.environ else " "
            print(f"{mark} {name:<{width}}  {value:<{min(values, 40)}}  {doc}")
        print("\n* set in the environment; others show their default")
    for problem in problems:
        click.echo(f"pgasdl env: {click.style(problem, fg='red')}", err=True)
    return 1 if problems else 0


@cli.command("doctor", example="pgasdl doctor")
@json_option
def _doctor(json_file: str | None) -> int:
    """Report what this machine offers, by trying it, with fixes."""
    from pgasdl.tools.doctor import main as diagnose

    return diagnose(json_file)


@cli.command("topo", example="pgasdl topo")
@json_option
def _topo(json_file: str | None) -> int:
    """List GPUs and RDMA devices, the one used, and why not others."""
    from pgasdl.tools.topo import main as survey

    return survey(json_file)


@cli.command("version", example="pgasdl version")
@json_option
def _version(json_file: str | None) -> None:
    """Print the version."""
    write_json({"version": package_version()}, json_file)
    if not takes_stdout(json_file):
        print(package_version())


@cli.command("completion", help=_COMPLETION_HELP, example="pgasdl completion bash")
@click.argument("shell", type=Names(SHELLS, "shell"), metavar=f"({'|'.join(SHELLS)})")
def _completion(shell: str) -> None:
    """Print a shell's script."""
    kind = get_completion_class(shell)
    assert kind is not None
    print(kind(cli, {}, "pgasdl", _COMPLETE_VARIABLE).source())


def package_version() -> str:
    """Return the installed package's version."""
    import importlib.metadata  # takes as long as all of click

    try:
        return importlib.metadata.version("pgasdl")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"
