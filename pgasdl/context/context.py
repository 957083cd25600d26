"""The making and the end of a context, and the context of this process."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Self

from pgasdl import _native
from pgasdl.collectives.allreduce import Allreduces
from pgasdl.collectives.arrays import ArrayCollectives
from pgasdl.collectives.policy import Policy
from pgasdl.collectives.state import AnswerCalls, CollectiveState
from pgasdl.config import Config, Limits
from pgasdl.context.collectives import CollectiveCalls
from pgasdl.context.memory import MemoryCalls
from pgasdl.context.peers import PeerCalls
from pgasdl.context.reports import Reports
from pgasdl.device.streams import stream_handle
from pgasdl.group import Group
from pgasdl.job import Job
from pgasdl.numa import distances
from pgasdl.pool import Pool
from pgasdl.segment import SegmentTable
from pgasdl.topology import Topology

_PATIENCE = 5.0  # seconds for others to leave the job's store before who serves it


class Context(MemoryCalls, CollectiveCalls, PeerCalls, Reports, _native.ContextCore):
    """One rank of a job. Made by :func:`init`; use it in a ``with`` statement.

    The one-sided operations (``write``, ``write_notify``, ``notify_waitsome`` ...) may be called
    from any thread. Leaving the ``with`` block closes the context; if an exception leaves it, the
    waits of the other ranks end with :class:`PeerLostError`.

    Attributes
    ----------
    config : Config
        Its settings.
    topology : Topology
        Ranks, hosts and routes.
    launch : Launch
        The place of this rank in the job.
    policy : Policy
        Plans by size; may be empty.
    world : Group
        The group of all ranks.
    """

    def __init__(self, config: Config, topology: Topology, policy: Policy, job: Job) -> None:
        self.config = config
        self.topology = topology
        self.launch = topology.launch
        self.policy = policy
        self._job = job
        super().__init__(
            self.launch.rank,
            self.launch.size,
            list(topology.routes.names),
            job.token,
            job.threads,
            verbs=_native.VerbsOptions(
                **config.verbs_options(), distances=distances(), turn=topology.turn
            ),
            mpi=job.mpi,
            survivable=job.survivable,
            **config.core_options(self.launch.size, oversubscribed=topology.oversubscribed),
        )
        self._connect(job.exchange("endpoint", self._endpoint()))
        self._join(job.exchange("world", self._open()), config.timeout)
        self.world = Group(self, topology, self._world())
        self.segments = SegmentTable(self)
        self.state = CollectiveState(self, self.segments, policy, config.gpu_piece)
        self._pool = Pool(self.segments, self.world)
        self._allreduces = Allreduces(self.state, self.world)
        self._arrays = ArrayCollectives(self.state)
        self.segments.watch(self._allreduces.forget)
        _native.serve_with(self, AnswerCalls(self.state), stream_handle)
        if config.progress == "thread":
            _native.progress_thread(self, True)
        self.world.barrier(timeout=config.timeout)

    @property
    def limits(self) -> Limits:
        """Limits of this context."""
        return self.config.limits(self.size)

    def close(self, *, failed: bool = False) -> None:
        """Leave the job. Idempotent. Requests that were posted still arrive.

        ``failed``: this rank failed, and the others' waits raise PeerLostError.
        """
        self._end(failed=failed, patience=0.0 if failed else _PATIENCE)

    def _end(self, *, failed: bool, patience: float) -> None:
        """Leave the job; ``patience``: most seconds to let others leave its store first."""
        if self.closed:
            return
        self._close(failed)
        self._allreduces.clear()
        self._arrays.clear()
        self.state.clear()
        self._pool.clear()
        self._job.leave(self, patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._job.report(self, error)
        in_peace = error is None or (isinstance(error, SystemExit) and not error.code)
        self.close(failed=not in_peace)

    def __repr__(self) -> str:
        if not hasattr(self, "world"):  # debuggers may ask before __init__ ends
            return "<Context, not joined>"
        state = "closed" if self.closed else "/".join(sorted(set(self.topology.routes.names)))
        return f"<Context rank {self.rank} of {self.size}, {state}>"


# The context of this process; contexts of ranks that are threads do not count.
_current: weakref.ref[Context] | None = None


def current() -> Context | None:
    """Return the open context that :func:`init` made, None if there is none.

    Ranks that are threads of one process have none in common: they pass theirs on.
    """
    context = None if _current is None else _current()
    return None if context is None or context.closed else context


def set_current(context: Context) -> None:
    """Make ``context`` the process's own. :func:`init` calls it."""
    global _current  # noqa: PLW0603
    _current = weakref.ref(context)
