"""Passive messages: from any rank to whoever receives."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from contract_harness import ORDERING, contract

import pgasdl


@contract(ranks=3, on=ORDERING)
def test_from_one_to_all(ctx: Any) -> None:
    if ctx.rank == 0:
        for peer in range(1, ctx.size):
            ctx.passive_send(peer.to_bytes(4, "little"), peer)
    else:
        assert ctx.passive_receive() == (0, ctx.rank.to_bytes(4, "little"))


@contract(ranks=2)
def test_sizes(ctx: Any) -> None:
    """0 B to the limit; one byte more is refused, and nothing is sent."""
    sizes = (0, 1, 4, 1024, 4096, 65535, 65536)
    assert ctx.limits.passive_bytes == 65536
    if ctx.rank == 0:
        for n in sizes:
            ctx.passive_send(np.random.default_rng(n).bytes(n), 1)
        for n in (65537, 1 << 20):
            with pytest.raises(pgasdl.BufferRefusedError, match="65536"):
                ctx.passive_send(bytes(n), 1)
        ctx.passive_send(b"end", 1)
    else:
        for n in sizes:
            assert ctx.passive_receive() == (0, np.random.default_rng(n).bytes(n))
        assert ctx.passive_receive() == (0, b"end")


@contract(ranks=2, passive_bytes=24)
def test_a_limit_of_ones_own(ctx: Any) -> None:
    assert ctx.limits.passive_bytes == 24
    if ctx.rank == 0:
        ctx.passive_send(bytes(range(24)), 1)
        with pytest.raises(pgasdl.BufferRefusedError, match=r"at most 24 \(PGASDL_PASSIVE_BYTES"):
            ctx.passive_send(bytes(25), 1)
    else:
        assert ctx.passive_receive() == (0, bytes(range(24)))


@contract(ranks=2, on=ORDERING)
def test_order_of_999(ctx: Any) -> None:
    n = 999 if ctx.transport_of(0) == "shm" else 99
    if ctx.rank == 0:
        for number in range(n):
            ctx.passive_send(f"message {number}".encode(), 1)
    else:
        for number in range(n):
            assert ctx.passive_receive() == (0, f"message {number}".encode())


@contract(ranks=3)
def test_senders_take_turns(ctx: Any) -> None:
    """All others send to rank 0, which learns who sent what, in each sender's order."""
    n = 30
    if ctx.rank == 0:
        inbox: dict[int, list[int]] = {1: [], 2: []}
        for _ in range(2 * n):
            sender, message = ctx.passive_receive()
            inbox[sender].append(int(message))
        assert inbox == {1: list(range(n)), 2: list(range(n))}
    else:
        for number in range(n):
            ctx.passive_send(str(number).encode(), 0)


@contract(ranks=(1, 2))
def test_to_self(ctx: Any) -> None:
    ctx.passive_send(b"me", ctx.rank)
    with pytest.raises(pgasdl.PgasTimeoutError):
        ctx.passive_send(b"too early", ctx.rank, timeout=0)
    assert ctx.passive_receive() == (ctx.rank, b"me")
    ctx.passive_send(b"again", ctx.rank, timeout=0.5)
    assert ctx.passive_receive(timeout=0.5) == (ctx.rank, b"again")


@contract(ranks=2)
def test_receive_timeout(ctx: Any) -> None:
    for timeout in (0, 0.05):
        with pytest.raises(pgasdl.PgasTimeoutError, match="no rank has sent"):
            ctx.passive_receive(timeout=timeout)
    ctx.barrier()
    ctx.passive_send(b"now", 1 - ctx.rank)
    assert ctx.passive_receive() == (1 - ctx.rank, b"now")


@contract(ranks=2, on=ORDERING)
def test_send_retried_until_taken(ctx: Any) -> None:
    """timeout=0 in a loop: a refused message is not sent; an accepted one arrives once."""
    n = 20
    if ctx.rank == 0:
        for number in range(n):
            end = time.monotonic() + 10
            while True:
                try:
                    ctx.passive_send(bytes([number]), 1, timeout=0)
                    break
                except pgasdl.PgasTimeoutError:
                    assert time.monotonic() < end
                    time.sleep(0.0005)
    else:
        for number in range(n):
            assert ctx.passive_receive() == (0, bytes([number]))
        with pytest.raises(pgasdl.PgasTimeoutError):
            ctx.passive_receive(timeout=0)


@contract(ranks=2)
def test_anything_with_bytes(ctx: Any) -> None:
    peer = 1 - ctx.rank
    for data in (bytearray(b"ab"), memoryview(b"abc"), np.arange(3, dtype=np.int16)):
        ctx.passive_send(data, peer)
        assert ctx.passive_receive() == (peer, bytes(data))
    for data in ("text", 5, None, [1]):
        with pytest.raises(TypeError):
            ctx.passive_send(data, peer)
    with pytest.raises((BufferError, TypeError, ValueError)):
        ctx.passive_send(np.arange(10)[::2], peer)
    for wrong in (-1, 2, 2**31, 2**64):
        with pytest.raises(pgasdl.RankError):
            ctx.passive_send(b"x", wrong)
    with pytest.raises(pgasdl.PgasTimeoutError):
        ctx.barrier()
        ctx.passive_receive(timeout=0)


@contract(ranks=2, on=ORDERING)
def test_several_senders_of_one_rank(ctx: Any) -> None:
    """Threads may send at once; no message is lost, doubled or torn."""
    n = 25
    if ctx.rank == 0:

        def send(thread: int) -> None:
            for number in range(n):
                ctx.passive_send(bytes([thread, number]) * 500, 1)

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(send, range(3)))
    else:
        seen = []
        for _ in range(3 * n):
            _, message = ctx.passive_receive()
            assert message == message[:2] * 500
            seen.append(tuple(message[:2]))
        assert sorted(seen) == [(thread, number) for thread in range(3) for number in range(n)]
