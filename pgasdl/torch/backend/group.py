"""The process group that torch.distributed makes: its ranks, names, parts and end."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from pgasdl.errors import ClosedError, RankError
from pgasdl.torch.backend import patches
from pgasdl.torch.backend.collectives import Collectives
from pgasdl.torch.backend.meet import SharedContext, find, keep, meet
from pgasdl.torch.backend.messages import Messages
from pgasdl.torch.backend.operations import Operations
from pgasdl.torch.backend.refused import Refusals
from pgasdl.torch.work import GroupWork, torch_errors
from pgasdl.torch.work_queue import WorkQueue

NAME = "pgasdl"
_Base: Any = distributed.ProcessGroup
# With a call at the end of Python, seconds. A thread that waits for a peer may be left there.
_PATIENCE = 1.0

_open: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """End the threads of groups that nobody destroyed.

    A thread that is still in PyTorch when Python ends would end the process by abort().
    """
    groups = list(_open)
    for group in groups:  # all of them: a callback may wait for another group's call
        group.refuse(ClosedError("Python ended, and nobody had destroyed the process group"))
    for group in groups:
        group.leave()


class ProcessGroup(Refusals, Operations, _Base):  # type: ignore[misc]
    """A process group of backend "pgasdl". Made by ``init_process_group`` and ``new_group``.

    ``ranks`` are numbers in the default group, ``rank`` is this process's place among them.
    ``context`` is pgasdl's, for what torch.distributed lacks; it is closed with the last group.
    """

    def __init__(
        self, shared: SharedContext, ranks: Sequence[int], rank: int, timeout: timedelta
    ) -> None:
        self._begin_apart(rank, len(ranks), timeout)
        self._enter(shared, ranks, rank)

    def _begin_apart(self, rank: int, size: int, timeout: timedelta) -> None:
        """Set up what it has without members."""
        _Base.__init__(self, rank, size)
        self._rank, self._size = rank, size
        self._n_splits = self._n_calls = 0
        self._timeout = timeout.total_seconds()
        self._name, self._description = "", ""
        self._coalesced: list[GroupWork] | None = None
        self._closed = False
        self._server: threading.Thread | None = None  # of messages, from the first one on

    def _enter(self, shared: SharedContext, ranks: Sequence[int], rank: int) -> None:
        """Become a group of ``ranks``."""
        self._rank, self._size, self._ranks = rank, len(ranks), tuple(ranks)
        self._shared = shared
        self.context = context = shared.context
        if list(ranks) != sorted(ranks):  # torch.distributed sorts them, too
            raise RankError(f"ranks {list(ranks)}: give the members of a group in rising order")
        places = [shared.ranks.index(each) for each in ranks]
        shared.look()
        shared.take()
        try:
            self._group = group = context.group(places, timeout=self._timeout)
            self._messages = Messages(context, group, self._timeout)
        except BaseException:
            context._job.give_up(tuple(places))  # the next call means the next group, on all ranks
            shared.give_back(failed=True)
            raise
        self._collectives = Collectives(context, group, self._messages)
        self._work_queue = WorkQueue("pgasdl-collectives")
        _open.add(self)

    # --- queries of torch.distributed

    def getBackendName(self) -> str:  # noqa: N802
        """Return the backend's name."""
        return NAME

    def name(self) -> str:
        """Return the backend's name."""
        return NAME

    def rank(self) -> int:
        """Return this process's place in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of members."""
        return self._size

    getRank, getSize = rank, size  # noqa: N815 - C++ asks by these names

    @property
    def _device_types(self) -> list[torch.device]:
        built: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
        types = ["cpu", "cuda"] if built else ["cpu"]
        return [torch.device(each) for each in types]

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        return self  # for every device; torch then asks for its abilities

    get_backend = _get_backend

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name that torch.distributed gives."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name that torch.distributed gave."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Take the description that the program gave."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description that the program gave."""
        return self._description

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default of every later operation."""
        self._timeout = timeout.total_seconds()

    def _get_sequence_number_for_group(self) -> int:
        return self._n_calls

    def _set_sequence_number_for_group(self) -> None:
        self._n_calls = 0

    # --- groups of its ranks

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """Make a group of ``ranks``, which are places in this one. Collective over those.

        None: this rank is not among them. ``dist.split_group`` lets torch.distributed know it, too.
        """
        members = patches.require_ranks(ranks, self._size)
        if self._rank not in members:
            return None
        seconds = timedelta(seconds=self._timeout) if timeout is None else timeout
        numbers = [self._ranks[member] for member in members]
        with torch_errors():
            part = ProcessGroup(self._shared, numbers, members.index(self._rank), seconds)
        part._set_group_name(group_name or f"{self._name}:split:{members}")
        part._set_group_desc(group_desc or f"{self._description}:split")
        return part

    def count_split(self) -> int:
        """Return how many splits there were before."""
        self._n_splits += 1
        return self._n_splits - 1

    # --- its end

    def abort(self) -> None:
        """End this rank's calls that are under way, with an error, and refuse new ones."""
        self.refuse(ClosedError("the process group was aborted"))

    def shutdown(self) -> None:
        """Give up everything that it holds. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._leave_members("the process group was destroyed")

    def _leave_members(self, why: str, *, at_once: bool = False) -> None:
        """Give up what it has with its members; ``at_once``: they may leave much later."""
        whole = self._work_queue.whole and not self._messages.failed
        self.refuse(ClosedError(why))
        _open.discard(self)
        self._work_queue.close(self._timeout, self._timeout)
        self._end_server()
        if not self.context.closed:
            self._shared.leave(self._group, self._give_up, whole=whole)
        self._shared.give_back(at_once=at_once)

    def _give_up(self) -> None:
        self._messages.close()
        self._collectives.close()
        self._group.delete()

    def leave(self) -> None:
        """End its threads, after :meth:`refuse`: Python ends."""
        self._work_queue.close(_PATIENCE, self._timeout)
        self._end_server()

    def _end_server(self) -> None:
        if self._server not in (None, threading.current_thread()):
            self._server.join()

    def refuse(self, error: ClosedError) -> None:
        """End calls that are under way, and refuse new ones, with ``error``."""
        self._work_queue.fail(error)
        self._collectives.stop(error)
        self._messages.fail(error)


patches.replace_builtin_hook(ProcessGroup)
patches.replace_flight_recorder(ProcessGroup)
patches.replace_split_group(ProcessGroup, NAME)


def create(given: Any, _: object = None) -> ProcessGroup:
    """Make the process group that torch.distributed asks for, by its options. Collective."""
    ranks = list(given.global_ranks_in_group) or list(range(given.group_size))
    keep(given.store)
    with torch_errors():
        shared = find(ranks) or meet(given.store, given.group_rank, ranks, given.timeout)
        return ProcessGroup(shared, ranks, given.group_rank, given.timeout)
