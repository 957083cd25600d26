"""The job of a context: its store, the set-up of its groups, and its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from pgasdl import _native
from pgasdl.config import Config
from pgasdl.errors import PeerLostError, PgasError, PgasTimeoutError
from pgasdl.runtime import flight_record
from pgasdl.runtime.bootstrap import REASON, Store
from pgasdl.runtime.group_setup import GroupSetup
from pgasdl.topology import Topology

_LAST_WORD_SECONDS = 2.0
# Their launchers leave ranks alone when one is lost: a program's own, and `run --keep-going`.
_SURVIVABLE = ("pgasdl", "loopback")


class StartedJob:
    """A rank's job, as :class:`pgasdl.job.Job` asks for it.

    The ranks meet in ``store``. ``threads`` or ``mpi`` is the world that they share if they are
    threads, or came through MPI; else None.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        store: Store,
        threads: _native.LoopbackWorld | None = None,
        mpi: _native.MpiWorld | None = None,
    ) -> None:
        self._config = config
        self._topology = topology
        self.store = store
        self.threads = threads
        self.mpi = mpi
        self.survivable = (
            mpi is None and bool(config.keep_going) and topology.launch.kind in _SURVIVABLE
        )
        self._groups = GroupSetup(store, survivable=self.survivable)

    @property
    def token(self) -> bytes:
        """A secret of the ranks of this job."""
        return self.store.token

    def exchange(self, key: str, value: bytes) -> list[bytes]:
        """Return every rank's ``value``, by rank. Collective."""
        return self.store.exchange(key, value, self._config.timeout)

    def form(
        self, context: _native.ContextCore, members: tuple[int, ...], limit: float
    ) -> _native.GroupCore:
        """Set up a group of ``members``, in ascending order, all reachable."""
        return self._groups.form(context, members, limit)

    def give_up(self, members: tuple[int, ...]) -> None:
        """Let the next group of ``members`` be another one than the one that was not completed."""
        self._groups.give_up(members)

    def accept(self, lost: Iterable[int]) -> None:
        """Allow groups although these ranks are lost."""
        self._groups.accepted = frozenset(lost)

    def report(self, context: _native.ContextCore, error: BaseException) -> None:
        """Report the error that ends this rank."""
        if isinstance(error, (PgasTimeoutError, PeerLostError)):
            self.dump(context, f"after {type(error).__name__}: {error}", to_file=True)
        self._give_reason(context, error)
        flight_record.report_to_elastic(error)

    def _give_reason(self, context: _native.ContextCore, error: BaseException) -> None:
        """Leave a line for the launcher, and for the errors of the other ranks.

        The ranks notice losses themselves: a loss that led to this error is no reason for them.
        """
        chain = [error]
        while (why := chain[-1].__cause__ or chain[-1].__context__) and why not in chain:
            chain.append(why)
        cause = next((each for each in chain if isinstance(each, PeerLostError)), None)
        shown = cause or error
        line = f"{type(shown).__name__}: {shown}".splitlines()[0].encode(errors="replace")
        if cause is None:
            context._give_reason(line[:180].decode(errors="ignore"))
        if self._topology.launch.kind == "pgasdl" and self.mpi is None:
            with contextlib.suppress(PgasError, OSError):
                self.store.put(f"{REASON}/{context.rank}", line[:1000], _LAST_WORD_SECONDS)

    def dump(self, context: _native.ContextCore, reason: str, *, to_file: bool = False) -> None:
        """Write the flight record."""
        name = f"pgasdl-{self._topology.launch.job_id}-rank-{context.rank}.txt"
        flight_record.dump(context._record(), reason, self._config.trace, name, to_file=to_file)

    def leave(self, context: _native.ContextCore, patience: float) -> None:
        """Leave the job: the context is closed. Let others leave first, for so many seconds."""
        if any(row.by_mpi for row in self._topology.routes.rows):
            from pgasdl.runtime.mpi.shutdown import note_losses

            note_losses(context.rank, context._health())
        # Ranks in one process share a store object that must outlive them.
        self.store.close(drain=patience)
