"""A process group whose members change: shrink, grow, and go on after losses."""

from __future__ import annotations

import secrets
import socket
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c10d

from pgasdl.config import Config
from pgasdl.errors import ClosedError, ConfigError
from pgasdl.runtime import join
from pgasdl.torch.backend.group import ProcessGroup
from pgasdl.torch.backend.meet import MOST_SECONDS, SharedContext, keep
from pgasdl.torch.work import GroupWork, as_torch, seconds_of, torch_errors


class _NoMembers:
    """Stands for what a group does with its members while it has none."""

    whole, failed = True, False

    def fail(self, error: Exception) -> None:
        """Nothing is under way."""

    stop = fail

    def close(self, *_: float) -> None:
        """Nothing is open."""

    def __getattr__(self, name: str) -> Any:
        raise as_torch(ClosedError("the process group has no members: reconfigure it first"))


class ReconfigurableGroup(ProcessGroup):
    """What ``init_process_group(..., enable_reconfigure=True)`` makes. PyTorch 2.14 and newer.

    It has no members, and refuses every call, until :meth:`reconfigure`, which may be called again
    with other members; the ranks meet in the ``store`` of ``init_process_group``.
    """

    supports_reconfigure = True

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._begin_apart(rank, size, timeout)
        self._store, self._handle = store, secrets.token_hex(16)
        self._without_members()

    def _without_members(self) -> None:
        self._work_queue: Any = _NoMembers()
        self._collectives: Any = self._work_queue
        self._messages: Any = self._work_queue
        self._joined = False

    def get_reconfigure_handle(self) -> str:
        """Return a name of this rank, for the ``handles`` of every other one."""
        return self._handle

    def reconfigure(self, options: Any) -> GroupWork:
        """Leave the members of before, and become a group of those with ``handles``. Collective.

        A list numbers the ranks by position, a set in the order of the handles. ``uuid`` must be
        new. What other ranks still had under way with this one fails there.
        """
        handles = options.handles
        order = list(handles) if isinstance(handles, list) else sorted(handles)
        with torch_errors():
            if order.count(self._handle) != 1 or len(set(order)) != len(order):
                raise ConfigError(f"{len(order)} handles: each rank's once, this one's among them")
            seconds = seconds_of(options.timeout, self._timeout)
            rank, size = order.index(self._handle), len(order)
            config = Config.from_environment(
                rank=rank, size=size, timeout=min(seconds, MOST_SECONDS)
            )
            prefix = join.claim(self._store, str(options.uuid), config)
            self._end_members("the process group was reconfigured")
            context = join.meet(self._store, prefix, config, socket.gethostname(), once=True)
            self._enter(SharedContext(context, range(size), ours=True), range(size), rank)
            self._joined = True
            context.barrier(timeout=seconds)  # nobody goes on to others while one still enters
        work = GroupWork([])
        work.end_unseen()
        return work

    def get_error(self) -> Any:
        """Return whether a member was lost."""
        lost = self._joined and {"failed", "died", "stopped"} & set(self.context.health())
        return c10d.ErrorType.COMM_ERROR if lost else c10d.ErrorType.SUCCESS

    def shutdown(self) -> None:
        """Give up everything that it holds. Idempotent."""
        if not self._closed:
            self._closed = True
            self._end_members("the process group was destroyed")

    def _end_members(self, why: str) -> None:
        if self._joined:
            self._leave_members(why, at_once=True)
        self._server = None
        self._without_members()


def create(given: Any, _: object = None) -> ProcessGroup:
    """Make the process group that torch.distributed asks for, by its options."""
    keep(given.store)
    return ReconfigurableGroup(given.store, given.group_rank, given.group_size, given.timeout)
