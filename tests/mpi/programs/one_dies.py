"""Rank 1 dies, fails or stops; the others wait for it, write to it, or go on. Arguments: how."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pgasdl

HOW = sys.argv[1]
LETTER = 32 << 10  # a write that the sender is in the middle of when it stops


def slow_to_tell(*error: Any) -> None:
    """Show an exception as Python does, later than the others take to end."""
    time.sleep(1.5)
    sys.__excepthook__(*error)


def leave_the_others() -> None:
    """End or stop in the way that the command line names."""
    time.sleep(0.3)
    if HOW == "fails":
        sys.excepthook = slow_to_tell
        raise ZeroDivisionError("on purpose")
    os.kill(os.getpid(), signal.SIGKILL if HOW == "killed" else signal.SIGSTOP)


def say_what_may_stay() -> None:
    """Print this process, and the files of its shared memory."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    shared = {words[5] for words in lines if words[1].endswith("s") and len(words) == 6}
    for name in {f"/proc/{os.getpid()}", *shared}:
        # MPICH forwards the output of ranks in pieces of its own: lines may be joined.
        if name.startswith(("/proc", "/dev/shm", "/tmp")) and "(deleted)" not in name:
            print(f"holds <{name}>", flush=True)


def main() -> None:
    """Wait for what never comes."""
    with pgasdl.init(log="warning", timeout=60) as ctx:
        segment = ctx.segment(LETTER)
        say_what_may_stay()
        ctx.barrier()
        if ctx.rank == 1 and HOW == "writing":
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
            while True:
                ctx.write_notify(segment[:LETTER], 0, segment[:LETTER], 1)
                ctx.wait()
        if ctx.rank == 1:
            leave_the_others()
        if HOW == "unread":
            while True:
                ctx.write(segment[:8], 1, segment[8:16])
                ctx.wait()
        if HOW == "unanswered":
            while True:
                ctx.atomic_fetch_add(segment[8:16], 1, 1)
        try:
            while ctx.notify_waitsome(segment) is not None:
                ctx.notify_reset(segment, 1)
        except pgasdl.PeerLostError as error:
            if HOW != "stopped":
                raise
            print(f"rank {ctx.rank} goes on without rank {error.rank}", flush=True)
            assert ctx.survivors().ranks == (0, 2)


if __name__ == "__main__":
    main()
