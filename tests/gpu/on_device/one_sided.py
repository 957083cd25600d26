"""One-sided operations between two processes, with streams: data is there when its flag is."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from cuda_arrays import Array, Stream
from one_sided import orders, resets, rings

from on_device import driver, ranks
from on_device.findings import Tell

PUT, ACK = 0, 1  # notifications


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    turns, sizes = (3, (4096,)) if smoke else (60, (4, 4096, 1 << 20, 16 << 20))
    for by in ("stream", "host"):
        name = f"write_notify, the {by} waits"
        with tell.step(name):
            ranks.run(
                2, "on_device.one_sided:puts", tell, timeout=40, turns=turns, sizes=sizes, by=by
            )
            tell.check(name, True, turns=turns, sizes=sizes)
    with tell.step("write, read, lists"):
        ranks.run(2, "on_device.one_sided:others", tell, timeout=20)
        tell.check("write, read, lists", True)
    for n in (2,) if smoke else (2, 4):
        for program in (rings,) if smoke else (rings, orders, resets):
            name = f"{program.__name__}, {n} ranks"
            with tell.step(name):
                ranks.run(n, "on_device.one_sided:program", tell, timeout=20, name=program.__name__)
                tell.check(name, True)


def program(ctx: Any, tell: Tell, *, name: str) -> None:
    """A part of programs/one_sided.py."""
    {"rings": rings, "orders": orders, "resets": resets}[name](ctx)


def pattern(nbytes: int, turn: int) -> Any:
    return np.random.default_rng([nbytes, turn]).integers(0, 256, nbytes, np.uint8)


def puts(ctx: Any, tell: Tell, *, turns: int, sizes: list[int], by: str) -> None:
    """Rank 0 puts what kernels of random length delay, rank 1 looks what is there."""
    stream, work, pick = Stream(), driver.Work(), random.Random(1)
    for nbytes in sizes:
        segment = ctx.segment(nbytes, device="cuda:0")
        mine = Array(nbytes, "u1", segment.address)
        for turn in range(turns):
            wanted = pattern(nbytes, turn)
            if ctx.rank == 0:
                work.turns(stream, pick.choice((0, 100, 20000)))
                mine.fill(wanted, stream)
                ctx.write_notify_on(stream, segment[:], 1, segment[:], PUT, turn + 1)
                ctx.notify_waitsome(segment, ACK, 1)
                ctx.notify_reset(segment, ACK)
                continue
            if by == "stream":
                ctx.notify_wait_on(stream, segment, PUT)
                ctx.notify_reset_on(stream, segment, PUT)
            else:
                ctx.notify_waitsome(segment, PUT, 1)
                assert ctx.notify_reset(segment, PUT) == turn + 1
            found = mine.values(stream)
            wrong = int((found != wanted).sum())
            assert not wrong, f"turn {turn}: {wrong} of {nbytes} bytes are not those put"
            ctx.notify(0, segment, ACK)
        ctx.barrier()
        segment.delete()


def others(ctx: Any, tell: Tell) -> None:
    """Operations that the host orders, between device and device, device and host."""
    peer, stream = 1 - ctx.rank, Stream()
    there, here = ctx.segment(8192, device="cuda:0"), ctx.segment(8192)
    there.copy_from(pattern(4096, ctx.rank))
    ctx.barrier()
    ctx.write(there[0:4096], peer, there[4096:8192])
    ctx.wait()
    ctx.barrier()
    found = np.empty(4096, np.uint8)
    there.copy_to(found, 4096)
    assert (found == pattern(4096, peer)).all(), "write"
    ctx.read(here[0:4096], peer, there[0:4096])
    ctx.wait()
    assert (here.numpy()[:4096] == pattern(4096, peer)).all(), "read to the host"
    ctx.barrier()
    here.numpy()[:4096] = pattern(4096, 10 + ctx.rank)
    pairs = [(here[at : at + 1024], there[at : at + 1024]) for at in range(0, 4096, 1024)]
    ctx.write_list_notify_on(stream, pairs, peer, there, 7)
    ctx.notify_waitsome(there, 7, 1)
    there.copy_to(found)
    assert (found == pattern(4096, 10 + peer)).all(), "write_list_notify from the host"
    ctx.barrier()
    ctx.read_notify(there[4096:8192], peer, there[0:4096], 8)
    ctx.notify_waitsome(there, 8, 1)
    there.copy_to(found, 4096)
    assert (found == pattern(4096, 10 + ctx.rank)).all(), "read_notify"
    ctx.wait()
    ctx.barrier()
