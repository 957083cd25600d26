"""How a process with MPI ends: its windows are freed first, and after a loss the job is aborted."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from pgasdl import _native

_END_SECONDS = 10.0
_WORDS_SECONDS = 0.5  # launchers drop at an abort what they have not forwarded yet, tracebacks too

_worlds: list[_native.MpiWorld] = []
_ended_by: list[str] = []


def note_losses(rank: int, states: Sequence[str]) -> None:
    """Note whom a context that ends has lost: MPI cannot be finalised then, the job is aborted."""
    lost = {
        peer: state
        for peer, state in enumerate(states)
        if state not in ("healthy", "closed") and peer != rank
    }
    if lost:
        words = ", ".join(f"rank {peer} {state}" for peer, state in lost.items())
        _ended_by.append(f"rank {rank} of {len(states)}: {words}")


def finish_at_exit(world: _native.MpiWorld) -> None:
    """Keep a world until this process ends, which must give it up before MPI_Finalize."""
    _worlds.append(world)


@functools.cache  # once
def abort_or_finish_with_python() -> None:
    """Abort, or give the worlds up, when Python ends."""
    atexit.register(_end)


def _end() -> None:
    """End before mpi4py finalises MPI, which waits for every rank of the job."""
    from mpi4py import MPI

    if MPI.Is_finalized():
        return
    failed = hasattr(sys, "last_value")
    if _ended_by or (failed and MPI.COMM_WORLD.size > 1):
        why = _ended_by[0] if _ended_by else "this rank ends with an exception"
        print(f"pgasdl: {why}: MPI_Abort, for MPI_Finalize would wait", file=sys.stderr, flush=True)
        sys.stdout.flush()
        _unlink_shared_memory()
        time.sleep(_WORDS_SECONDS)
        MPI.COMM_WORLD.Abort(1)
    for world in _worlds:
        world.finish(_END_SECONDS)


def _unlink_shared_memory() -> None:
    """Unlink what MPICH unlinks in MPI_Finalize alone: see the package."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        names = {line.rstrip().split(maxsplit=5)[-1] for line in maps}
    for name in names:
        if name.startswith("/dev/shm/mpich_shm_"):  # noqa: S108
            with suppress(OSError):
                os.unlink(name)
