"""Steps: groups, barriers, segments, one-sided transfers, messages."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from oracle import reduced, require, value
from rank import Pending, Rank, step

# In every segment: a source, a target for each of up to eight senders, a word, two places for
# reads; then arrays (``account.ARRAYS``).
_PAGE = 4096
_WORD, _THEIRS, _MINE = 9 * _PAGE, 10 * _PAGE, 11 * _PAGE
_HEAD = struct.Struct("!QI")  # of a message: seed of its program, key of its step


@step
def group(r: Rank, name: str, ranks: Sequence[int], **how: Any) -> None:
    r.ranks_of[name] = tuple(ranks)
    if r.rank in ranks:
        made = r.create(lambda timeout: r.ctx.group(ranks, timeout=timeout), **how)
        assert made.ranks == tuple(ranks)
        r.objects[name] = made


@step
def barrier(r: Rank, group: str, **how: Any) -> None:
    of = r.objects[group]
    r.carry_out(Pending(lambda timeout: of.barrier(timeout=timeout), lambda: None), **how)


@step
def reduce(r: Rank, group: str, count: int, key: int, dtype: str, **how: Any) -> None:
    of, found = r.objects[group], []
    terms = [value(rank, key, count, dtype) for rank in r.ranks_of[group]]
    mine = terms[r.member(group)]

    def check() -> None:
        require(found[0], reduced(terms, False), "small allreduce")

    r.carry_out(
        Pending(lambda timeout: found.append(of.combine(mine, "sum", timeout=timeout)), check),
        **how,
    )


@step
def segment(r: Rank, name: str, group: str, nbytes: int, **how: Any) -> None:
    of = r.objects[group]
    made = r.create(lambda t: r.ctx.segment(nbytes, notifications=8, group=of, timeout=t), **how)
    here = made.numpy()  # peers may already write to the rest of it
    assert not here[:_PAGE].any() and not here[_MINE:].any(), "a new segment is not empty"
    r.made(name, group, made, adds=0)


@step
def put(
    r: Rank, segment: str, group: str, key: int, shift: int, nbytes: int, lag: Sequence[float]
) -> None:
    """Every member writes to another one with a notification, and checks what arrived here."""
    ranks, here = r.ranks_of[group], r.objects[segment]
    size, mine = len(ranks), r.member(group)
    time.sleep(lag[r.rank])
    here.numpy()[:nbytes] = _bytes(mine, key, nbytes)
    there = _PAGE * (1 + mine)
    target = here[there : there + nbytes]
    r.ctx.write_notify(here[:nbytes], ranks[(mine + shift) % size], target, mine, key)
    sender = (mine - shift) % size
    assert r.ctx.notify_waitsome(here, sender, 1) == sender
    assert r.ctx.notify_reset(here, sender) == key
    came = here.numpy()[_PAGE * (1 + sender) :][:nbytes]
    require(came, _bytes(sender, key, nbytes), "notified write")
    r.ctx.wait()
    r.objects[group].barrier()


@step
def count(
    r: Rank, segment: str, group: str, key: int, shift: int, nbytes: int, lag: Sequence[float]
) -> None:
    """Every member writes to all of them; each waits until all of these writes have come."""
    ranks, here = r.ranks_of[group], r.objects[segment]
    size, mine = len(ranks), r.member(group)
    time.sleep(lag[r.rank])
    here.numpy()[:nbytes] = _bytes(mine, key, nbytes)
    there = _PAGE * (1 + mine)
    for other in range(size):
        peer = ranks[(other + shift) % size]
        r.ctx.write_notify_add(here[:nbytes], peer, here[there : there + nbytes], 0, 2)
    assert r.ctx.notify_wait_count(here, 0, 2 * size) == 0
    for sender in range(size):
        came = here.numpy()[_PAGE * (1 + sender) :][:nbytes]
        require(came, _bytes(sender, key, nbytes), "counted write")
    r.ctx.wait()
    r.objects[group].barrier()


@step
def get(
    r: Rank, segment: str, group: str, key: int, shift: int, nbytes: int, lag: Sequence[float]
) -> None:
    """Every member reads from another one."""
    ranks, here = r.ranks_of[group], r.objects[segment]
    peer = (r.member(group) + shift) % len(ranks)
    here.numpy()[_THEIRS : _THEIRS + nbytes] = _bytes(r.member(group), key, nbytes)
    time.sleep(lag[r.rank])
    r.objects[group].barrier()
    mine, theirs = here[_MINE : _MINE + nbytes], here[_THEIRS : _THEIRS + nbytes]
    r.ctx.read(mine, ranks[peer], theirs)
    r.ctx.wait()
    came = here.numpy()[_MINE : _MINE + nbytes]
    require(came, _bytes(peer, key, nbytes), "read")
    r.objects[group].barrier()


@step
def atomics(r: Rank, segment: str, group: str, lag: Sequence[float], **_: Any) -> None:
    """Every member adds one to a word of the first one."""
    word, first = r.objects[segment][_WORD : _WORD + 8], r.ranks_of[group][0]
    time.sleep(lag[r.rank])
    r.ctx.atomic_fetch_add(word, first, 1)
    r.notes[segment]["adds"] += len(r.ranks_of[group])
    r.objects[group].barrier()
    assert r.ctx.atomic_fetch_add(word, first, 0) == r.notes[segment]["adds"]
    r.objects[group].barrier()


@step
def passive(r: Rank, shift: int, key: int, lag: Sequence[float]) -> None:
    """Every rank sends a message to another one."""
    size = r.ctx.size
    time.sleep(lag[r.rank])
    send(r, (r.rank + shift) % size, key, b"passive")
    assert receive(r, (r.rank - shift) % size, key) == b"passive"


def send(r: Rank, peer: int, key: int, message: bytes) -> None:
    """A message that belongs to this step."""
    r.ctx.passive_send(_HEAD.pack(r.seed, key) + message, peer)


def receive(r: Rank, sender: int, key: int) -> bytes:
    """The message of this step; messages from ranks that are ahead are kept for later steps."""
    wanted = sender, _HEAD.pack(r.seed, key)
    while wanted not in r.mail:
        who, message = r.ctx.passive_receive()
        r.mail[who, message[: _HEAD.size]] = message[_HEAD.size :]
    return r.mail.pop(wanted)


def _bytes(member: int, key: int, nbytes: int) -> np.ndarray:
    return value(member, key, nbytes, "int32").astype(np.uint8)
