"""Options of all commands that measure."""

from __future__ import annotations

import math
from collections.abc import Callable

import click

from pgasdl.errors import ConfigError
from pgasdl.tools.command import Function, Names
from pgasdl.transports import SETTINGS


def transport_option(default: str) -> Callable[[Function], Function]:
    """Return the option ``--transport``."""
    return click.option(
        "--transport",
        default=default,
        type=Names(SETTINGS, "transport"),
        show_default=True,
        metavar=f"[{'|'.join(SETTINGS)}]",
        help="How bytes reach the peers.",
    )


def seconds_option(function: Function) -> Function:
    """Add the option ``--seconds``."""
    return click.option(
        "--seconds",
        type=float,
        default=0.02,
        show_default=True,
        metavar="S",
        help="Length of one turn in a round, about.",
    )(function)


def check_rounds(repeat: int, seconds: float) -> None:
    """Refuse numbers out of range."""
    if not 1 <= repeat <= 10_000:
        raise ConfigError(f"--repeat {repeat}: 1 to 10000 rounds")
    if not (math.isfinite(seconds) and 0 < seconds <= 3600):
        raise ConfigError(f"--seconds {seconds}: more than 0, at most 3600")
