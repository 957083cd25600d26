"""Segments on a GPU that peers do not reach: what is refused, in which words, and what works.

``unreached.py`` : ranks are threads. ``unreached.py differ``: only rank 1 has PGASDL_GPU=staged.
``unreached.py job``: ranks are a launcher's. Rank 0 prints what each call said.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda_arrays import Array, Device, Stream

import pgasdl
from pgasdl import loopback

COUNT = 300


def told(call: Callable[[], object]) -> str:
    """The error of a call."""
    try:
        call()
    except pgasdl.PgasError as error:
        return f"{type(error).__name__}: {error}"
    return "works"


def run(ctx: Any) -> dict[str, str]:
    with Device():
        return _run(ctx)


def _run(ctx: Any) -> dict[str, str]:
    peer, stream = 1 - ctx.rank, Stream()
    bound = Array(COUNT, np.float32)
    segment, host = ctx.segment(4 * COUNT, device="cuda:0"), ctx.segment(64)
    outside = ctx.bind(bound)
    here, there = segment[0:8], segment[8:16]
    said = {
        "write": told(lambda: ctx.write(here, peer, there)),
        "write from the host": told(lambda: ctx.write(host[0:8], peer, there)),
        "write to the host": told(lambda: ctx.write(here, peer, host[0:8])),
        "write to oneself": told(lambda: ctx.write(host[0:8], ctx.rank, there)),
        "bound": told(lambda: ctx.write(outside[0:8], peer, host[0:8])),
        "read": told(lambda: ctx.read(here, peer, there)),
        "read to the host": told(lambda: ctx.read(host[0:8], peer, there)),
        "write_notify": told(lambda: ctx.write_notify(here, peer, there, 0)),
        "write_notify_on": told(lambda: ctx.write_notify_on(stream, here, peer, there, 0)),
        "atomic": told(lambda: ctx.atomic_fetch_add(there, peer, 1)),
        "stream waits": told(lambda: ctx.notify_wait_on(stream, segment, 0)),
        "stream resets": told(lambda: ctx.notify_reset_on(stream, segment, 0)),
        "beyond": told(lambda: ctx.write(here, peer, segment[4 * COUNT - 4 : 4 * COUNT + 4])),
    }
    ctx.barrier()
    for turn in (1, 2):
        ctx.notify(peer, segment, 3, turn)
        assert ctx.notify_waitsome(segment) == 3
        assert ctx.notify_reset(segment, 3) == turn
        ctx.barrier()
    values = np.arange(COUNT, dtype=np.float32) + ctx.rank
    for place in (segment, outside):
        assert place.device == "cuda:0" and place.nbytes == place.nbytes_of(peer) == 4 * COUNT
        place.copy_from(values)
        array = Array(COUNT, np.float32, place.address)
        ctx.allreduce(array, stream=stream)
        found = np.empty_like(values)
        stream.synchronize()
        place.copy_to(found)
        assert (found == 2 * values + (1 - 2 * ctx.rank)).all()
    ctx.barrier()
    for each in (segment, outside, host):
        each.delete()
    return said


def differ(ctx: Any) -> dict[str, str]:
    said = {"segment": told(lambda: ctx.segment(64, device="cuda:0"))}
    ctx.barrier()
    return said


def main() -> None:
    how = sys.argv[1:]
    if how and "PGASDL_RANK" in os.environ and how == ["differ"]:
        os.environ["PGASDL_GPU"] = ("auto", "staged")[int(os.environ["PGASDL_RANK"])]
    if not how:
        print(json.dumps(loopback.run(2, run)[0]))
        return
    with pgasdl.init(log="error", timeout=30) as ctx:
        said = (differ if how == ["differ"] else run)(ctx)
        if ctx.rank == 0:
            print(json.dumps(said))


main()
