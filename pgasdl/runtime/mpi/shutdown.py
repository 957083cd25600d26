"""The end of a process with MPI: it frees its windows first, and after a loss aborts the job."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from pgasdl import _native
from pgasdl.errors import PeerLostError

if TYPE_CHECKING:
    from mpi4py import MPI

_END_SECONDS = 10.0
# At an abort launchers drop output that they have not forwarded, such as tracebacks.
_WORDS_SECONDS = 0.5
_FAILED_SECONDS = 5.0  # in which a failed rank may say why and abort the job itself

_worlds: list[_native.MpiWorld] = []
_losses: list[tuple[str, set[str]]] = []  # in words, and the states of the lost ranks


def note_losses(rank: int, states: Sequence[str]) -> None:
    """Note the losses of a context that ends: then the job is aborted, not finalised."""
    lost = {
        peer: state
        for peer, state in enumerate(states)
        if state not in ("healthy", "closed") and peer != rank
    }
    if lost:
        words = ", ".join(f"rank {peer} {state}" for peer, state in lost.items())
        _losses.append((f"rank {rank} of {len(states)}: {words}", set(lost.values())))


def finish_at_exit(world: _native.MpiWorld) -> None:
    """Keep a world until this process ends; it is released before MPI_Finalize."""
    _worlds.append(world)


@functools.cache  # once
def abort_or_finish_with_python() -> None:
    """Abort the job, or finish the worlds, when Python ends."""
    atexit.register(_end)


def _end() -> None:
    """Abort, or finish the worlds, before mpi4py finalises MPI, which waits for every rank."""
    from mpi4py import MPI

    if MPI.Is_finalized():
        return
    error: BaseException | None = getattr(sys, "last_value", None)
    if _losses or (error is not None and MPI.COMM_WORLD.size > 1):
        own = error is not None and not isinstance(error, PeerLostError)
        _abort(MPI.COMM_WORLD, error if own else None)
    for world in _worlds:
        world.finish(_END_SECONDS)


def _abort(world: MPI.Intracomm, error: BaseException | None) -> None:
    """Say why in one write, which no launcher mixes with the output of other ranks, and abort.

    ``error`` is the error that ends this rank, unless it only reports a lost rank.
    """
    if error is not None:
        why = f"rank {world.rank} of {world.size} ends with {type(error).__name__}: {error}"
    else:
        why = _losses[0][0] if _losses else f"rank {world.rank} of {world.size} lost a rank"
    sys.stdout.flush()
    sys.stderr.write(f"pgasdl: {why}: MPI_Abort, for MPI_Finalize would wait\n")
    sys.stderr.flush()
    _unlink_shared_memory()
    # Ranks that failed are still there and know the reason.
    failed_alone = error is None and all(states == {"failed"} for _, states in _losses)
    time.sleep(_FAILED_SECONDS if failed_alone else _WORDS_SECONDS)
    world.Abort(1)


def _unlink_shared_memory() -> None:
    """Unlink the file that MPICH unlinks only in MPI_Finalize: see the package."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        names = {line.rstrip().split(maxsplit=5)[-1] for line in maps}
    for name in names:
        if name.startswith("/dev/shm/mpich_shm_"):  # noqa: S108
            with suppress(OSError):
                os.unlink(name)
