"""The context of a process group's ranks, which meet through torch.distributed's store."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from pgasdl.config import Config
from pgasdl.context import Context, current, set_current
from pgasdl.errors import ConfigError, PgasError
from pgasdl.group import Group
from pgasdl.runtime import join
from pgasdl.runtime.init import start_joined
from pgasdl.transports import is_by_mpi

# Start-up's own deadlines; a whole day would hide a rank that never comes.
MOST_SECONDS = 24 * 3600.0


class SharedContext:
    """A context and the process groups that use it; the last one closes it if it is ``ours``.

    ``ranks`` has each rank's number in torch.distributed's default group.
    """

    def __init__(self, context: Context, ranks: Sequence[int], *, ours: bool) -> None:
        self.context, self.ranks, self._ours = context, tuple(ranks), ours
        self._n_users = 0
        self._left: list[tuple[Group, Callable[[], None]]] = []
        self._kept: list[tuple[Group, Callable[[], None]]] = []
        self._lock = threading.Lock()

    def take(self) -> None:
        """Count one more process group that uses it."""
        self._n_users += 1

    def leave(self, group: Group, give_up: Callable[[], None], *, whole: bool) -> None:
        """Give up the memory of a process group once no member writes there any more.

        A member that receives a message writes a credit into the sender's memory. An adapter
        refuses writes to memory that is gone, which breaks the connection for all its users. So
        each member reports to the others that it has left, and nobody waits for that.

        ``whole``: every call of the process group was made. Else the memory is kept until the
        context is closed, unless it is mapped: a member may come to a call much later.
        """
        if group.mapped:
            give_up()
            return
        with self._lock:
            (self._left if whole else self._kept).append((group, give_up))
        self.look()

    def look(self) -> None:
        """Give up the memory of groups that all members have left by now."""
        with self._lock:
            self._left = [each for each in self._left if not self._given_up(*each)]

    def _given_up(self, group: Group, give_up: Callable[[], None]) -> bool:
        try:
            self.context.wait(timeout=0)  # this rank's own messages have arrived
            group.allgather("the end of a process group", b"", timeout=0)
        except PgasError:
            return False
        give_up()
        return True

    def give_back(self, *, failed: bool = False, at_once: bool = False) -> None:
        """One process group fewer uses it; ``at_once``: others may leave much later."""
        self._n_users -= 1
        if self._n_users == 0:
            if self in _shared:
                _shared.remove(self)
            if self._ours and at_once:
                self.context._end(failed=failed, patience=0.0)
            elif self._ours:
                self.context.close(failed=failed)


_shared: list[SharedContext] = []
_kept: Store | None = None


def find(ranks: Sequence[int]) -> SharedContext | None:
    """Return a context of which all ``ranks`` of the default group are members."""
    for shared in _shared:
        if not shared.context.closed and set(ranks) <= set(shared.ranks):
            return shared
    return None


def keep(store: Store) -> None:
    """Keep the server of the ranks' TCPStore until they meet in another one, or Python ends.

    PyTorch drops it with the default process group. Ranks that left the group earlier, and are
    about to make the next one, are connected to it by then: rank 0 finds them there, since a
    process has one TCPStore for each port.
    """
    global _kept  # noqa: PLW0603
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        _kept = store


def meet(store: Any, rank: int, ranks: Sequence[int], timeout: timedelta) -> SharedContext:
    """Make a context for a process group, or take the program's own. Collective.

    Only these ranks use ``store``. ``ranks`` are numbers in the default group, ``rank`` is this
    process's place among them; ``timeout`` is for meeting, and the default of every call.
    """
    size = len(ranks)
    own = current()
    if own is not None and (own.rank, own.size) == (rank, size):
        shared = SharedContext(own, ranks, ours=False)
    else:
        seconds = min(timeout.total_seconds(), MOST_SECONDS)
        config = Config.from_environment(rank=rank, size=size, timeout=seconds)
        context = _started(store, config, os.environ.get("MASTER_ADDR", ""))
        if own is None:
            set_current(context)
        shared = SharedContext(context, ranks, ours=True)
    _shared.append(shared)
    return shared


def meet_apart(store: Any, rank: int, size: int, timeout: timedelta) -> SharedContext:
    """Make a context for one process group only, beside others of this process. Collective."""
    seconds = min(timeout.total_seconds(), MOST_SECONDS)
    config = Config.from_environment(rank=rank, size=size, timeout=seconds)
    # MASTER_ADDR is that of each part of the job.
    context = _started(store, config, socket.gethostname())
    return SharedContext(context, range(size), ours=True)


def _started(store: Any, config: Config, own_host: str) -> Context:
    if not is_by_mpi(config.transport):
        return join.meet(store, "pgasdl", config, own_host)
    from pgasdl.runtime.mpi.meet import join as join_mpi

    joined = join_mpi(None, config)
    launch = joined.launch
    if (launch.rank, launch.size) != (config.rank, config.size):
        raise ConfigError(
            f"rank {config.rank} of {config.size} of the process group is rank {launch.rank} of "
            f"{launch.size} of MPI: give init_process_group MPI's numbers"
        )
    return start_joined(config, launch, joined.store, joined.world)
