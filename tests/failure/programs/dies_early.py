"""One rank kills itself on the way in or out: ``dies_early.py STEP VICTIM``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from rank_tools import report, say, until

import pgasdl
import pgasdl.context
from pgasdl import PeerLostError, PgasError
from pgasdl.context import Context

IN = {
    "place": (pgasdl.runtime.bootstrap.StoreClient, "exchange"),
    "places": (pgasdl.runtime.bootstrap.StoreClient, "gather"),
    "endpoint": (Context, "_endpoint"),
    "connect": (Context, "_connect"),
    "open": (Context, "_open"),
    "join": (Context, "_join"),
    "barrier": (Context, "_world"),
}
OUT = {
    "before close": (Context, "_close"),
    "after close": (pgasdl.runtime.bootstrap.StoreClient, "close"),
}


def die(*_: Any, **__: Any) -> None:
    say("dying")
    os.kill(os.getpid(), signal.SIGKILL)


def main(step: str, victim: int) -> None:
    me = int(os.environ["PGASDL_RANK"]) == victim
    if me and step == "start":
        die()
    if me and step in IN:
        setattr(*IN[step], die)
    try:
        with pgasdl.init() as ctx:
            ctx.segment(4096)
            if me and step in OUT:
                setattr(*OUT[step], die)
                return
            say("running")
            try:
                ctx.barrier()
            except PgasError as error:
                report(ctx, error)
                until(lambda: ctx.health()[victim] != "healthy", 2)
                say("health", health=ctx.health())
    except PgasError as error:
        rank = error.rank if isinstance(error, PeerLostError) else None
        say("refused", kind=type(error).__name__, rank=rank, text=str(error))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
