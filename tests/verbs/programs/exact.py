"""Every kind of operation between all ranks, each result compared bit for bit.

``exact.py HOSTS [TRANSPORT [NETEM...]]``: ``01/23`` stands for ranks 0 and 1 on one host, 2 and 3
on another. The transport must be verbs between hosts and shm inside a host, or everywhere
``TRANSPORT``. Words of tc's netem spoil each host's end of the cable before the start.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np

import pgasdl
from pgasdl import Context

SIZES = (1, 8, 63, 4096, 65539, 400_000)
SPAN = 1 << 19  # bytes of a segment for each rank that writes
N_ADDS = 20


def pattern(sender: int, receiver: int, n: int) -> np.ndarray:
    """Bytes that no other pair of ranks sends."""
    return np.random.default_rng((sender, receiver, n)).integers(0, 256, n, np.uint8)


def check_routes(ctx: Context, hosts: list[str], everywhere: str) -> None:
    """Mapped memory inside a host, RDMA between hosts; this rank itself counts as inside."""
    own = next(host for host in hosts if str(ctx.rank) in host)
    for peer in range(ctx.size):
        wanted = everywhere or ("shm" if str(peer) in own else "verbs")
        assert ctx.transport_of(peer) == wanted, (peer, ctx.transport_of(peer), wanted)


def writes_and_notifications(ctx: Context) -> None:
    """Each rank writes to each with its own notification; then it reads back what it wrote."""
    inbox = ctx.segment(ctx.size * SPAN, notifications=ctx.size)
    outbox = ctx.segment(2 * SPAN, notifications=4)
    ctx.barrier()
    for turn, n in enumerate(SIZES):
        for step in range(ctx.size):
            peer = (ctx.rank + step) % ctx.size
            at = ctx.rank * SPAN + turn
            outbox.numpy()[:n] = pattern(ctx.rank, peer, n)
            ctx.write_notify(
                outbox[0:n], peer, inbox[at : at + n], ctx.rank, value=turn * 100 + peer + 1
            )
            ctx.wait()
        for _ in range(ctx.size):
            sender = ctx.notify_waitsome(inbox)
            assert sender is not None
            assert ctx.notify_reset(inbox, sender) == turn * 100 + ctx.rank + 1
            at = sender * SPAN + turn
            assert (inbox.numpy()[at : at + n] == pattern(sender, ctx.rank, n)).all(), (turn, n)
        for peer in range(ctx.size):
            at = ctx.rank * SPAN + turn
            ctx.read_notify(outbox[SPAN : SPAN + n], peer, inbox[at : at + n], 1, value=turn + 1)
            assert ctx.notify_waitsome(outbox, 1, 1) == 1
            assert ctx.notify_reset(outbox, 1) == turn + 1
            assert (outbox.numpy()[SPAN : SPAN + n] == pattern(ctx.rank, peer, n)).all()
        ctx.barrier()


def lists(ctx: Context) -> None:
    """Write many pieces to the right neighbour, and read many from the left one."""
    segment = ctx.segment(3 * 6400, notifications=1)
    view = segment.numpy().reshape(3, 6400)
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    view[0] = pattern(ctx.rank, right, 6400)
    ctx.barrier()
    forward = [(segment[i : i + 64], segment[6400 + i : 6464 + i]) for i in range(0, 6400, 64)]
    ctx.write_list_notify(forward, right, segment, 0, value=9)
    ctx.notify_waitsome(segment)
    assert ctx.notify_reset(segment, 0) == 9
    assert (view[1] == pattern(left, ctx.rank, 6400)).all()
    back = [(segment[12800 + i : 12864 + i], segment[i : i + 64]) for i in range(0, 6400, 64)]
    ctx.read_list(back, left)
    ctx.wait()
    assert (view[2] == pattern(left, ctx.rank, 6400)).all()
    ctx.barrier()


def atomics(ctx: Context) -> None:
    """A counter that all ranks add to, and a word that exactly one rank takes."""
    segment = ctx.segment(64, notifications=1)
    ctx.barrier()
    seen = [ctx.atomic_fetch_add(segment[0:8], 0, 1) for _ in range(N_ADDS)]
    assert len(set(seen)) == N_ADDS
    old = ctx.atomic_compare_swap(segment[8:16], ctx.size - 1, 0, ctx.rank + 1)
    ctx.barrier()
    words = segment.numpy(np.uint64)
    if ctx.rank == 0:
        assert words[0] == N_ADDS * ctx.size
    if ctx.rank == ctx.size - 1:
        assert 1 <= words[1] <= ctx.size
    winners = ctx.world.combine(np.array([float(old == 0)]), "sum")
    assert winners[0] == 1.0
    ctx.barrier()


def reductions(ctx: Context) -> None:
    """The same sum on every rank, whatever transport carries it; of integers, so it is known."""
    for n in (1, 1000, 50_000):
        for plan in ("gdraa", "tree"):
            array = np.arange(n, dtype=np.float32) % 1000 + ctx.rank
            ctx.allreduce(array, "sum", plan=plan)
            total = ctx.size * (np.arange(n) % 1000) + sum(range(ctx.size))
            assert (array == total.astype(np.float32)).all(), (n, plan)
    top = ctx.world.combine(np.array([1.0 * ctx.rank, -ctx.rank]), "max")
    assert top.tolist() == [ctx.size - 1.0, 0.0]


def messages(ctx: Context) -> None:
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    for n in (0, 5, 30_000):
        ctx.passive_send(pattern(ctx.rank, right, n).tobytes(), right)
        sender, data = ctx.passive_receive()
        assert (sender, data) == (left, pattern(left, ctx.rank, n).tobytes())


def main(hosts: str, everywhere: str = "", *netem: str) -> None:
    if netem:
        line = ["tc", "qdisc", "replace", "dev", "vec0", "root", "netem", "limit", "10000", *netem]
        subprocess.run(line, check=True)
    with pgasdl.init() as ctx:
        check_routes(ctx, hosts.split("/"), everywhere)
        for part in (writes_and_notifications, lists, atomics, reductions, messages):
            part(ctx)
            print(f"{part.__name__} are exact", flush=True)
        ctx.barrier()
        assert set(ctx.health()) == {"healthy"}
        ctx.barrier()
    print("complete")


if __name__ == "__main__":
    main(*sys.argv[1:])
