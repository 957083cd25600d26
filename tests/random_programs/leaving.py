"""Steps: a rank leaves, and the others go on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence

import numpy as np
from rank import Left, Rank, step

import pgasdl


@step
def leave(r: Rank, name: str, rank: int, how: str, dropped: Sequence[bool]) -> None:
    """A rank closes its context, raises or is killed; every wait of the others ends by its loss."""
    try:
        r.ctx.barrier()  # nobody is in an earlier step
    except pgasdl.PeerLostError:
        assert r.rank != rank
    if r.rank == rank:
        if how == "close":
            r.ctx.close()
        elif how == "kill" and not r.threads:
            os.kill(os.getpid(), signal.SIGKILL)
        raise Left
    for pending in r.held.values():
        with contextlib.suppress(pgasdl.PeerLostError):
            pending.attempt(None)
    if dropped[r.rank]:  # objects that peers and plans may still use
        r.clear()
    array = np.ones(100, np.float32)
    for call in (
        r.ctx.world.barrier,
        lambda: r.ctx.allreduce(array, op="sum"),
    ):
        try:
            call()
        except pgasdl.PeerLostError as error:
            assert error.rank == rank, error
            continue
        raise AssertionError(f"rank {rank} has left, and a collective of all ranks ended")


@step
def survivors(r: Rank, name: str, rank: int) -> None:
    left = tuple(each for each in range(r.ctx.size) if each != rank)
    r.ranks_of[name] = left
    r.held.clear()
    r.objects[name] = r.ctx.survivors()
    assert r.objects[name].ranks == left
