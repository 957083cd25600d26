"""The common part of all commands: errors of pgasdl as the command's, names, and ``--json``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from pgasdl.errors import ConfigError, PgasError
from pgasdl.tools.text import ALL, parse_names, unknown_name

USAGE_ERROR = 2

if TYPE_CHECKING:
    _Type = click.ParamType[Any, Any]
else:
    _Type = click.ParamType  # not generic before click 8.4

Function = TypeVar("Function", bound=Callable[..., Any])


@contextlib.contextmanager
def _named(ctx: click.Context) -> Iterator[None]:
    """Turn errors of pgasdl into click's, which know the command."""
    try:
        yield
    except ConfigError as error:
        raise click.UsageError(str(error), ctx) from error
    except PgasError as error:
        raise click.ClickException(str(error)) from error


class ToolCommand(click.Command):
    """One command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options."""
        with _named(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _named(ctx):
            return super().invoke(ctx)


class ToolGroup(click.Group):
    """Commands by name."""

    command_class = ToolCommand

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.no_args_is_help = False  # whose status was 0 before click 8.2

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
        """Find the command; an unknown name gets one that is like it."""
        known = self.list_commands(ctx)
        if not ctx.resilient_parsing and args[0] not in known and not args[0].startswith("-"):
            raise click.UsageError(str(unknown_name(args[0], known, "command")), ctx)
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
            raise unknown_name(value, self._known, self._what)
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


def json_option(function: Function) -> Function:
    """Add the option of every command that prints a table."""
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="One JSON document on standard output instead of the table.",
    )(function)


def colour() -> bool | None:
    """Whether to colour, by NO_COLOR and FORCE_COLOR; None: if the output is a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return True if os.environ.get("FORCE_COLOR") else None
