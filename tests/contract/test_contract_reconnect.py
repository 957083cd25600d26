"""Connections that are given up and made again, and what a fault leaves behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contract_harness import PROCESSES, contract

import pgasdl


@contract(ranks=3)
def test_reconnect_in_peace(ctx: Any) -> None:
    """A reconnect between two requests, by one side or by both, loses nothing."""
    segment = ctx.segment(64)
    peer = (ctx.rank + 1) % ctx.size
    view = segment.numpy(np.int64)
    for turn in range(1, 4):
        view[0] = 10 * turn + ctx.rank
        ctx.write_notify(segment[0:8], peer, segment[8:16], 0, turn)
        ctx.wait()
        assert ctx.notify_waitsome(segment, 0, 1) == 0
        assert ctx.notify_reset(segment, 0) == turn
        assert view[1] == 10 * turn + (ctx.rank - 1) % ctx.size
        ctx.barrier()
        if turn < 3 and ctx.rank < turn:
            ctx.reconnect(peer)
    with pytest.raises(pgasdl.RankError):
        ctx.reconnect(ctx.size)


@contract(ranks=2, on=PROCESSES)
def test_a_refused_request(ctx: Any) -> None:
    """A peer deleted its copy: its bytes stay, the error says where, and reconnect() works."""
    gone, kept = ctx.segment(64), ctx.segment(64)
    view = gone.numpy()
    ctx.barrier()
    if ctx.rank == 1:
        gone.delete()
        ctx.barrier()
        assert ctx.notify_waitsome(kept, 0, 1) == 0
        if ctx.transport_of(0) == "verbs":
            assert not view.any()
    else:
        view[:] = 7
        ctx.barrier()
        if ctx.transport_of(1) == "verbs":
            with pytest.raises(pgasdl.PgasError, match=r"write .* of rank 1.*refused"):
                ctx.write(gone[0:8], 1, gone[0:8])
                ctx.wait()
            ctx.reconnect(1)
        ctx.notify(1, kept, 0)
        ctx.wait()
