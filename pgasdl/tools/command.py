"""The common part of all commands: errors that end with what to type next, and ``--json``."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from pgasdl.errors import ConfigError, PgasError
from pgasdl.tools.json_document import STDOUT
from pgasdl.tools.sizes import ALL, UnknownName, parse_names

USAGE_ERROR = 2
_SIMILAR = 0.5

if TYPE_CHECKING:
    _Type = click.ParamType[Any, Any]
else:
    _Type = click.ParamType  # not generic before click 8.4

Function = TypeVar("Function", bound=Callable[..., Any])


class Failed(click.ClickException):
    """An error of pgasdl whose cause is not the command line."""

    def __init__(self, message: str, ctx: click.Context) -> None:
        super().__init__(message)
        self.ctx = ctx


@contextlib.contextmanager
def _named(ctx: click.Context) -> Iterator[None]:
    """Turn errors of pgasdl into click's, which know the command."""
    try:
        yield
    except ConfigError as error:
        raise click.UsageError(str(error), ctx) from error
    except PgasError as error:
        raise Failed(str(error), ctx) from error


class Command(click.Command):
    """One command.

    Attributes
    ----------
    example : str
        A line that works.
    """

    def __init__(self, *arguments: Any, example: str = "", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.example = example

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options."""
        with _named(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _named(ctx):
            return super().invoke(ctx)


class Group(click.Group):
    """Commands by name; ``example`` is a line that works."""

    command_class = Command

    def __init__(self, *arguments: Any, example: str = "", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.no_args_is_help = False  # whose status was 0 before click 8.2
        self.example = example

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names in the order in which they were added."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options; without arguments, show the help."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(USAGE_ERROR)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first word names."""
        if not ctx.resilient_parsing and not args[0].startswith("-"):
            known = self.list_commands(ctx)
            with _named(ctx):
                if args[0] not in known:
                    raise UnknownName(args[0], known, "command")
        return super().resolve_command(ctx, args)


class Names(_Type):
    """A parameter: one of several names, or ``several`` by commas. A shell completes them."""

    name = "name"

    def __init__(self, known: Sequence[str], what: str, *, several: bool = False) -> None:
        self._known, self._what, self._several = tuple(known), what, several

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | tuple[str, ...]:
        """Check the names; a list becomes a tuple."""
        if not isinstance(value, str):
            return tuple(value)
        if self._several:
            return parse_names(value, self._known, self._what)
        if value not in self._known:
            raise UnknownName(value, self._known, self._what)
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete the last name."""
        return complete((*self._known, ALL) if self._several else self._known, incomplete)


class PlanNames(_Type):
    """A parameter: plans by commas, with options in parentheses. The command checks them later."""

    name = "plans"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete the last name."""
        from pgasdl.plans import PLANS

        return complete(sorted(PLANS), incomplete)


def complete(known: Sequence[str], incomplete: str) -> list[CompletionItem]:
    """Complete the last name in "a,b,c" with ``known`` names."""
    before, comma, last = incomplete.rpartition(",")
    return [CompletionItem(f"{before}{comma}{name}") for name in known if name.startswith(last)]


class _JsonFile(_Type):
    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        file = str(value)
        if file == STDOUT:
            return file
        if not os.path.isdir(os.path.dirname(file) or "."):
            raise ConfigError(f"--json {file}: no such directory")
        return os.path.abspath(file)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


def json_option(function: Function) -> Function:
    """Add the option of every command that prints a table."""
    return click.option(
        "--json",
        "json_file",
        is_flag=False,
        flag_value=STDOUT,
        type=_JsonFile(),
        metavar="[FILE]",
        help="One JSON document on standard output instead of the table; with FILE: there, beside "
        "the table.",
    )(function)


def colour() -> bool | None:
    """Whether to colour, by NO_COLOR and FORCE_COLOR; None: if the output is a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return True if os.environ.get("FORCE_COLOR") else None


def report(error: click.ClickException, words: Sequence[str]) -> int:
    """Print an error and what to type next; return the exit status."""
    ctx: click.Context | None = getattr(error, "ctx", None)
    path = ctx.command_path if ctx is not None else "pgasdl"
    tint = colour()
    told = click.style("error:", fg="red", bold=True)
    click.echo(f"{path}: {told} {error.format_message()}", err=True, color=tint)
    for number, line in enumerate(_next_words(error, ctx, words)):
        lead = "    " if number else click.style("try:", fg="green", bold=True)
        click.echo(f"{lead} {line}", err=True, color=tint)
    return error.exit_code


def _next_words(
    error: click.ClickException, ctx: click.Context | None, words: Sequence[str]
) -> list[str]:
    cause = error.__cause__
    if isinstance(error, Failed):
        return []  # the message has what helps
    if isinstance(cause, UnknownName):
        better = _corrected(words, cause.given, cause.known)
    elif isinstance(error, click.NoSuchOption):
        known = [name for param in ctx.command.params for name in param.opts] if ctx else []
        better = _corrected(words, error.option_name, known)
    else:
        better = ""
    if better:
        return [better]
    example = getattr(ctx.command, "example", "") if ctx is not None else ""
    return [*filter(None, [example]), f"{ctx.command_path if ctx else 'pgasdl'} --help"]


def _corrected(words: Sequence[str], given: str, known: Sequence[str]) -> str:
    """Return the line with the nearest known name instead of ``given``; "" if none is near."""
    near = difflib.get_close_matches(given, known, n=1, cutoff=_SIMILAR)
    for at, word in enumerate(words):
        parts = re.split(r"([=,()])", word)
        if near and given in parts:
            parts[parts.index(given)] = near[0]
            return shlex.join(["pgasdl", *words[:at], "".join(parts), *words[at + 1 :]])
    return ""
