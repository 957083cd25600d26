"""Rank 0 waits, rank 1 computes without end and the others sleep: ``starved.py``."""

from __future__ import annotations

import time

from rank_tools import report, say

import pgasdl

with pgasdl.init() as ctx:
    segment = ctx.segment(64)
    say("running")
    try:
        while ctx.rank == 1:
            pass
        if ctx.rank > 1:
            time.sleep(1000)
        ctx.notify_waitsome(segment)
    except pgasdl.PeerLostError as error:
        report(ctx, error)
