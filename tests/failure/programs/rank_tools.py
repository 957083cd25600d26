"""Tools that the programs of the failure tests share: they print JSON, one object a line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pgasdl
from pgasdl import PeerLostError


def say(event: str, **data: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, "at": time.monotonic(), **data}) + "\n")
    sys.stdout.flush()


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def report(ctx: pgasdl.Context, error: BaseException, event: str = "lost") -> None:
    """Say which error ended a call, and what the state vector holds by then."""
    say(
        event,
        kind=type(error).__name__,
        rank=error.rank if isinstance(error, PeerLostError) else None,
        text=str(error),
        health=ctx.health(),
    )
