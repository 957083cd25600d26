"""The state that a user's communicator keeps between contexts: a copy of it, the core's world."""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Any

from pgasdl import _native
from pgasdl.errors import PgasTimeoutError
from pgasdl.runtime.mpi.library import sends_through_memory, source_in_status, threads, version
from pgasdl.runtime.mpi.shutdown import finish_at_exit

if TYPE_CHECKING:
    from mpi4py import MPI


class CommunicatorState:
    """The state that is attached to a user's communicator.

    ``comm`` is our copy of it, ``world`` the core's view of it. ``place`` is rank and size, and the
    same among the ranks of this machine.
    """

    comm: MPI.Intracomm
    place: tuple[int, int, int, int]
    world: _native.MpiWorld

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._arriving: MPI.Request | None = None
        self._complete = False

    def arrive(self, comm: MPI.Intracomm, seconds: float) -> None:
        """Wait until every rank is in init: collective calls that block come only after this.

        After a timeout the next call waits on.
        """
        # A begun barrier cannot be cancelled.
        arriving = self._arriving or (self.comm if self._complete else comm).Ibarrier()
        self._arriving = arriving
        deadline = time.monotonic() + seconds
        while not arriving.Test():
            if time.monotonic() > deadline:
                others = [rank for rank in range(comm.size) if rank != comm.rank]
                raise PgasTimeoutError(
                    f"init on rank {comm.rank} of {comm.size}: not all of rank "
                    f"{', '.join(map(str, others[:16]))} came within {seconds:g} s (MPI does not "
                    "tell who is missing)"
                )
            time.sleep(0.0002)
        self._arriving = None
        if not self._complete:
            self._finish(comm)

    def _finish(self, comm: MPI.Intracomm) -> None:
        mpi = self._mpi
        self.comm = comm.Dup()
        self.comm.Set_errhandler(mpi.ERRORS_RETURN)
        local = self.comm.Split_type(mpi.COMM_TYPE_SHARED)
        self.place = (comm.rank, comm.size, local.rank, local.size)
        group, all_ranks = local.Get_group(), self.comm.Get_group()
        near = mpi.Group.Translate_ranks(group, None, all_ranks)
        local.Free()
        handles = {
            "communicator": self.comm,
            "byte": mpi.BYTE,
            "uint64": mpi.UINT64_T,
            "sum": mpi.SUM,
            "info_null": mpi.INFO_NULL,
            "errors_return": mpi.ERRORS_RETURN,
        }
        open_mpi_4 = version(mpi).startswith("Open MPI v4.")
        numbers = {
            "no_check": mpi.MODE_NOCHECK,
            "any_source": mpi.ANY_SOURCE,
            "win_model": mpi.WIN_MODEL,
            "win_unified": mpi.WIN_UNIFIED,
            "source_in_status": source_in_status(mpi),
            "own_by_processor": int(open_mpi_4),
            "windows_by_turns": int(open_mpi_4),
            "far_puts": int(version(mpi).startswith("MPICH")),
        }
        self.world = _native.MpiWorld.make(
            mpi.__file__,
            mpi._sizeof(mpi.Comm) == struct.calcsize("P"),
            {name: mpi._handleof(handle) for name, handle in handles.items()},
            numbers,
            threads(mpi),
            self.comm.rank,
            self.comm.size,
            {int(rank) for rank in near},
            sends_through_memory(mpi),
        )
        finish_at_exit(self.world)
        self._complete = True


_keyval: int | None = None


def state_of(mpi: Any, comm: MPI.Intracomm) -> CommunicatorState:
    """Return the state of a communicator; make it if it has none.

    MPI frees windows only when it makes later ones, so existing ones are used again.
    """
    global _keyval  # noqa: PLW0603
    if _keyval is None:
        _keyval = mpi.Comm.Create_keyval()
    known = comm.Get_attr(_keyval)
    if isinstance(known, CommunicatorState):
        return known
    state = CommunicatorState(mpi)
    comm.Set_attr(_keyval, state)
    return state
