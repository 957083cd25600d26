"""Groups of many members, and what members put into the store for each other."""

from __future__ import annotations

import hashlib
import threading

import pytest
from support.ranks import on_ranks

from pgasdl import Context, MismatchError, PeerLostError, loopback
from pgasdl.runtime.bootstrap.store import bitmap

N_RANKS = 301


@pytest.mark.full
def test_many_members_and_many_survivors() -> None:
    """The list of members is longer than a key of the start-up store may be."""
    formed = threading.Barrier(N_RANKS)

    def program(ctx: Context) -> tuple[int, int]:
        if ctx.rank == N_RANKS - 1:
            formed.wait(100)
            ctx.close(failed=True)
            return N_RANKS - 1, N_RANKS - 1
        group = ctx.group(range(N_RANKS - 1), timeout=100)
        formed.wait(100)
        with pytest.raises(PeerLostError):
            ctx.barrier(timeout=100)
        return group.size, ctx.survivors(timeout=100).size

    assert set(loopback.run(N_RANKS, program, timeout=200)) == {(N_RANKS - 1, N_RANKS - 1)}


@on_ranks(3)
def test_members_of_two_groups_with_one_key_are_told(ctx: Context) -> None:
    """No two sets of members share half a SHA-256; if they did, the values would show it."""
    mine, other = (
        hashlib.sha256(bitmap(members, ctx.size)).digest() for members in ([0, 1], [1, 2])
    )
    key = f"group/{mine[:16].hex()}/0"
    if ctx.rank == 1:
        ctx._job.store.put(f"{key}/1", other + bytes(100))
    ctx.barrier()
    if ctx.rank == 0:
        with pytest.raises(MismatchError, match=r"group of ranks 0, 1: rank 1 means another"):
            ctx.group([0, 1], timeout=10)
    ctx.barrier()  # nobody leaves before
