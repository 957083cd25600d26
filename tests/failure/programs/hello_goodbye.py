"""init, and the end at once: ``hello_goodbye.py HOW``."""

from __future__ import annotations

import contextlib
import sys
import threading

from rank_tools import say

import pgasdl

ctx = pgasdl.init()
say("here")
if sys.argv[1] == "with":
    with ctx:
        pass
elif sys.argv[1] == "close":
    ctx.close()
    ctx.close()
elif sys.argv[1] == "again":
    for _ in range(5):
        ctx.close()
        ctx = pgasdl.init()
elif sys.argv[1] == "del":
    del ctx
elif sys.argv[1] == "threads":  # which wait in the core when Python ends
    segment = ctx.segment(0)

    def wait() -> None:
        # Python ends the process by abort() if a thread is printing an error when it ends.
        with contextlib.suppress(pgasdl.PgasError):
            ctx.notify_waitsome(segment)

    for _ in range(8):
        threading.Thread(target=wait, daemon=True).start()
    ctx.barrier()
