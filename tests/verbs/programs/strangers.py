"""A job of two: rank 0 runs pgasdl, rank 1 is foreign.py. Each checks what the other did to it."""

from __future__ import annotations

import os
import sys

import numpy as np

import pgasdl
from pgasdl.config import Config
from pgasdl.runtime import bootstrap
from pgasdl.runtime.bootstrap.detect import detect

NBYTES, NOTIFICATIONS = 4096, 16
TEXT = bytes(range(1, 256)) * 4
LATER = 100  # offset of what rank 0 writes


def ours() -> None:
    """Rank 0."""
    with pgasdl.init() as ctx:
        segment = ctx.segment(NBYTES, notifications=NOTIFICATIONS)
        bytes_here = segment.numpy()
        assert ctx.notify_waitsome(segment) == 3
        assert ctx.notify_reset(segment, 3) == 12345
        assert bytes_here[8 : 8 + len(TEXT)].tobytes() == TEXT
        assert not bytes_here[8 + len(TEXT) :].any()
        print("was written to and notified by pyverbs")

        ctx.read(segment[2048 : 2048 + len(TEXT)], 1, segment[0 : len(TEXT)])
        ctx.wait()
        assert bytes_here[2048 : 2048 + len(TEXT)].tobytes() == TEXT[::-1]
        assert ctx.atomic_fetch_add(segment[2040:2048], 1, 5) == 7
        print("read from and added to memory of pyverbs")

        bytes_here[:] = np.arange(NBYTES) % 251
        source = segment[0:1000]
        ctx.write_notify(source, 1, segment[LATER : LATER + 1000], 5, value=77)
        ctx.wait()
        assert ctx.notify_waitsome(segment) == 4
        assert ctx.notify_reset(segment, 4) == 1
        assert segment.numpy(np.uint64)[511] == int.from_bytes(pattern()[4088:], "little") + 1
        ctx.barrier()
        assert ctx.health() == ("healthy", "healthy")
    print("complete")


def pattern() -> bytes:
    return (np.arange(NBYTES) % 251).astype(np.uint8).tobytes()


def theirs() -> None:
    """Rank 1."""
    # At the end of the path, so that only what is missing comes from the system's Python.
    sys.path.append("/usr/lib/python3/dist-packages")
    from foreign import Foreign

    config = Config.from_environment()
    with bootstrap.connect(config, detect(config)) as store:
        rank = Foreign(store)
        rank.connect()
        rank.barrier()
        own, there = rank.segment(NBYTES, NOTIFICATIONS)
        own.data.write(TEXT[::-1], len(TEXT))
        own.data.write((7).to_bytes(8, "little"), 8, 2040)
        rank.write(TEXT, there.data + 8, there.data_key)
        rank.raise_flag(there, 3, 12345)

        rank.until(lambda: own.flag(5) != 0, "rank 0's notification")
        assert own.flag(5) == 77
        assert own.data.read(1000, LATER) == pattern()[:1000]
        assert int.from_bytes(own.data.read(8, 2040), "little") == 12
        print("was written to and notified by pgasdl")

        assert rank.read(512, there.data, there.data_key) == pattern()[:512]
        old = rank.add_one(there.data + 4088, there.data_key)
        assert old == int.from_bytes(pattern()[4088:], "little")
        rank.raise_flag(there, 4, 1)
        rank.barrier()
        rank.leave()
    print("complete")


if __name__ == "__main__":
    (ours, theirs)[int(os.environ["PGASDL_RANK"])]()
