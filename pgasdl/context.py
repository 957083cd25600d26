"""The context: one rank of a job, and everything a program asks of it.

It is a facade: memory is in ``segment``, collectives are in ``collectives``, and the job is behind
:class:`Job`. The core itself has the one-sided operations: a program calls them without a detour.
"""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import numpy as np

from pgasdl import _native
from pgasdl.buffers import memory_of
from pgasdl.collectives.allreduce import Allreduces, repeated
from pgasdl.collectives.bound import kind_of, reduction_of
from pgasdl.collectives.handle import Collective
from pgasdl.collectives.policy import Policy
from pgasdl.collectives.state import AnswerCalls, CollectiveState
from pgasdl.config import Config, Limits
from pgasdl.counters import Counters, Traffic, Waits
from pgasdl.device.names import ordinal_of
from pgasdl.device.streams import stream_handle
from pgasdl.errors import PeerLost, RankError, UnavailableError
from pgasdl.footprint import Footprint
from pgasdl.group import Group
from pgasdl.job import Job
from pgasdl.numa import distances
from pgasdl.openmetrics import exposition
from pgasdl.pool import Pool
from pgasdl.segment import Segment, SegmentTable
from pgasdl.topology import Topology


class Context(_native.ContextCore):
    """One rank of a job. Made by :func:`init`; use it in a ``with`` statement.

    The one-sided operations (``write``, ``write_notify``, ``notify_waitsome`` ...) may be called
    from any thread. Leaving the ``with`` block closes the context; if an exception leaves it, the
    waits of the other ranks end with :class:`PeerLost`.

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
            **config.core_options(self.launch.size, oversubscribed=topology.oversubscribed),
        )
        self._connect(job.exchange("endpoint", self._endpoint()))
        self._join(job.exchange("world", self._open()), config.timeout)
        self.world = Group(self, topology, self._world())
        self.segments = SegmentTable(self)
        self.state = CollectiveState(self, self.segments, policy, config.gpu_piece)
        self._pool = Pool(self.segments, self.world)
        self._allreduces = Allreduces(self.state, self.world)
        self.segments.watch(self._allreduces.forget)
        _native.serve_with(self, AnswerCalls(self.state), stream_handle)
        if config.progress == "thread":
            _native.progress_thread(self, True)
        self.world.barrier(timeout=config.timeout)

    @property
    def limits(self) -> Limits:
        """Limits of this context."""
        return self.config.limits(self.size)

    # --- memory

    @property
    def takes_devices(self) -> bool:
        """Whether peers reach segments on the first GPU, and PGASDL_GPU allows it.

        By shared memory they do, by verbs where the adapter reaches the GPU's memory. Else such
        segments have notifications, and their arrays take part in collectives, by way of the host;
        but nobody writes to them or reads from them.
        """
        return not _native.cuda_missing() and not self._why_unreached(0)

    def segment(
        self,
        nbytes: int,
        *,
        device: object = "cpu",
        notifications: int | None = None,
        group: Group | None = None,
        timeout: float | None = None,
    ) -> Segment:
        """Create memory that every member of a group can write to. Collective.

        Parameters
        ----------
        nbytes : int
            Size of this rank's copy, 0 <= nbytes; ranks may differ. Zero-filled, page-aligned.
        device : str, torch.device or cupy.cuda.Device, default "cpu"
            Where this rank's copy lies: "cpu"; a GPU as in "cuda:1"; "cuda": the current one of
            PyTorch or CuPy.
        notifications : int, optional
            Number for this rank's copy; None: ``limits.notifications``.
        group : Group, optional
            None: all ranks.
        timeout : float, optional
            Seconds; None: the context's default. After a Timeout the same call continues.

        Raises
        ------
        Timeout
            Names the ranks that have not called it.
        MismatchError
            A rank is in another collective.
        SegmentError, NotificationError
            Impossible sizes.
        ConfigError
            The name of no device.
        UnavailableError
            A device that is not available.

        Notes
        -----
        Where peers do not reach a GPU (:attr:`takes_devices`), a segment there has notifications,
        which the host waits for, and its arrays take part in collectives; what would write to its
        memory or read from it raises UnavailableError.
        It is a sealed memfd without a name in any file system: kill -9 leaves nothing behind.
        Where peers do not map it (verbs), it lives until it is deleted, because this rank cannot
        know when they are done.
        GASPI: gaspi_segment_create.
        """
        ordinal = ordinal_of(device)
        number = self.config.notifications if notifications is None else notifications
        return self.segments.make(group or self.world, nbytes, number, timeout, ordinal)

    def bind(
        self,
        buffer: object,
        *,
        notifications: int | None = None,
        group: Group | None = None,
        timeout: float | None = None,
    ) -> Segment:
        """Make memory allocated elsewhere a segment. Collective.

        Parameters
        ----------
        buffer : object
            Contiguous and writable: array, tensor, anything with the buffer protocol; on a GPU a
            tensor, a CuPy array, anything with ``__cuda_array_interface__`` or DLPack. The segment
            and its views keep it alive, and a ``bytearray`` or the like cannot be resized meanwhile
            (BufferError).
        notifications, group, timeout
            As for :meth:`segment`.

        Raises
        ------
        BufferRefused
            Strided, read-only, or no memory.
        UnavailableError
            A peer may not reach this process's memory; raised on first use.

        Notes
        -----
        Peers reach it by process_vm_writev and process_vm_readv (shm), not by loads and stores:
        plans that need mapped memory refuse it. Where Yama restricts these calls (ptrace_scope 1),
        the first bind admits other processes to this one's memory: its only peer, or the common
        launcher and everything that it started. Ranks without a common launcher admit every
        process of their user, and log it.
        GASPI: gaspi_segment_bind, gaspi_segment_use.
        """
        memory = memory_of(buffer, device=True)
        number = self.config.notifications if notifications is None else notifications
        return self.segments.bind(group or self.world, memory, number, timeout)

    def pool(
        self,
        nbytes: int,
        *,
        device: object = "cpu",
        group: Group | None = None,
        timeout: float | None = None,
    ) -> None:
        """Make the pool of arrays, or add to it. Collective.

        From then on :meth:`empty`, :meth:`zeros` and :meth:`empty_like` cut arrays from it, each
        rank by itself. :meth:`allreduce`, from 4 KB on, and persistent handles reduce them in
        place, wherever they lie on other ranks.

        Parameters
        ----------
        nbytes : int
            Size of this rank's new segment, 0 <= nbytes; ranks may differ. No array spans two.
        device : str, torch.device or cupy.cuda.Device, default "cpu"
            Where this rank's new segment lies; as for :meth:`segment`.
        group : Group, optional
            The members have it; None: all ranks. Arrays for groups within it are cut from it.
        timeout : float, optional
            Seconds; None: the context's default. After a Timeout the same call continues.

        Raises
        ------
        Timeout
            Names the ranks that have not called it.
        MismatchError
            A rank is in another collective.
        SegmentError
            An impossible size.
        ConfigError
            The name of no device.
        UnavailableError
            A device that is not available.

        Notes
        -----
        :meth:`describe` says how much is free.
        dMath: persistent memory, registered once.
        """
        self._pool.grow(nbytes, ordinal_of(device), timeout, group)

    def empty(
        self,
        shape: int | Iterable[int],
        dtype: Any = np.float32,
        *,
        device: object = "cpu",
        group: Group | None = None,
    ) -> Any:
        """Cut an array from the pool. Local; any thread may call it.

        Parameters
        ----------
        shape : int or Iterable[int]
            As for ``numpy.empty``.
        dtype : dtype, default np.float32
            NumPy's, "bfloat16", or PyTorch's: then it is a tensor.
        device : str, torch.device or cupy.cuda.Device, default "cpu"
            Where it is to lie; the pool has memory there.
        group : Group, optional
            The group whose collectives find it in place; None: all ranks.

        Returns
        -------
        ndarray, Tensor or, on a GPU, cupy.ndarray
            It is not initialized, and aligned to 64 bytes. The memory is used again when the array
            and all its views are gone. After :meth:`close` it is memory of this rank alone.

        Raises
        ------
        PoolFull
            No free block is so long, or there is no pool: all ranks call :meth:`pool`.
        BufferRefused
            A negative size, or a dtype of Python objects.
        ConfigError, UnavailableError
            The name of no device, or of one that is not available.
        """
        self._require_usable()
        return self._pool.empty(shape, dtype, ordinal_of(device), group)

    def zeros(
        self,
        shape: int | Iterable[int],
        dtype: Any = np.float32,
        *,
        device: object = "cpu",
        group: Group | None = None,
    ) -> Any:
        """Cut an array of zeros from the pool. Local; as :meth:`empty`."""
        array = self.empty(shape, dtype, device=device, group=group)
        array[...] = 0
        return array

    def empty_like(self, array: Any) -> Any:
        """Cut one of the same shape, dtype and device from the pool: a tensor for a tensor.

        Local; as :meth:`empty`.
        """
        self._require_usable()
        return self._pool.empty_like(array)

    @property
    def mapped(self) -> bool:
        """Whether every rank can load from and store to every other's segments."""
        return self.world.mapped

    # --- groups and collectives

    def group(self, ranks: Iterable[int], *, timeout: float | None = None) -> Group:
        """Form a group. Collective over its members only.

        Parameters
        ----------
        ranks : Iterable[int]
            The members, including this rank.
        timeout : float, optional
            Seconds; None: the context's default. After a Timeout the same call continues.

        Raises
        ------
        RankError
            No such rank, a rank twice, or this rank is missing.
        Timeout
            Names the rank that has not called it.
        PeerLost
            A member is gone.

        Notes
        -----
        GASPI: gaspi_group_create, gaspi_group_add, gaspi_group_commit.
        """
        members = tuple(sorted(ranks))
        self._require_usable()
        for member in members:
            self._require_peer(member, "group")
        core = self._job.form(self, members, self._seconds(timeout))
        return Group(self, self.topology, core, self._drop)

    def _drop(self, group: Group) -> None:
        """Give up the memory of a group that was deleted."""
        self._allreduces.drop(group)
        self.state.drop(group)
        self._pool.drop(group)

    def barrier(self, *, timeout: float | None = None) -> None:
        """``world.barrier``: wait until every rank is here."""
        self.world.barrier(timeout=timeout)

    @repeated
    def allreduce(
        self,
        array: Any,
        op: str = "sum",
        *,
        group: Group | None = None,
        plan: str | None = None,
        timeout: float | None = None,
        stream: object = None,
    ) -> Any:
        """Replace every rank's array by the sum of all, or another reduction. Collective.

        Parameters
        ----------
        array : array_like
            Contiguous and writable, same size and dtype on all ranks: array, tensor, or a segment
            slice (float32). float32, float64, float16, bfloat16, int32, int64.
        op : str, default "sum"
            "sum", "mean" (of floating point numbers), "min", "max" or "prod"; the last three on the
            host alone. min and max are NaN where some rank has NaN.
        group : Group, optional
            None: all ranks.
        plan : str, optional
            Name of an algorithm; None: chosen by size.
        timeout : float, optional
            Seconds; None: the context's default.
        stream : object, optional
            For an array on a GPU: the stream that orders the call. The call begins when the stream
            has done its earlier work, and later work of the stream comes after the result.
            The stream makes it, and the call does not wait, unless the array is copied to the host
            for it or lies in the pool. None: PyTorch's or CuPy's current stream.

        Returns
        -------
        object
            ``array``, with the same bits on every rank and in every run.

        Raises
        ------
        BufferRefused
            Strided, read-only, or a dtype that is not reduced.
        MismatchError
            A rank is in another collective, or came with another size or dtype.
        PeerLost, Timeout

        Notes
        -----
        Plans and handles are kept, so the first call with a size costs more. Arrays inside segments
        or the pool are reduced in place; others pass through a workspace. An array in a segment
        must be so on every rank; on a GPU so must one of 4 KB or more in the pool. On the host an
        array outside the pool on one rank, where others have theirs in it, lets all of its size
        pass through the workspace until :meth:`pool` is called again. A handle is fastest:
        :meth:`allreduce_handle`.
        """
        self._allreduces.run(array, op, group or self.world, plan, timeout, stream)
        return array

    def allreduce_handle(
        self,
        array: Any,
        op: str = "sum",
        *,
        group: Group | None = None,
        plan: str | None = None,
        timeout: float | None = None,
        out: Any = None,
        **options: int,
    ) -> Collective:
        """Make a persistent allreduce of one piece of memory. Collective; call it to run it.

        Parameters
        ----------
        array : array_like
            Any array or tensor. One of the pool (:meth:`empty`), or a view of a segment
            (``segment.numpy(np.float32)``), is reduced in place if it is such on every rank,
            wherever it lies there.
        op, group, plan, timeout
            As for :meth:`allreduce`.
        out : array_like, optional
            Where the result goes; None: into ``array``.
        **options : int
            Options of the plan, such as ``chunks=8``.

        Returns
        -------
        Collective
            ``handle()`` runs it; ``handle.start()`` and ``handle.wait()`` overlap it.
        """
        kind, group = kind_of(op), group or self.world
        reduction = reduction_of(op)
        return Collective(self.state, kind, array, out, group, plan, timeout, options, reduction)

    def collective_handle(
        self,
        kind: str,
        array: Any,
        *,
        group: Group | None = None,
        plan: str | None = None,
        timeout: float | None = None,
        out: Any = None,
        **options: int,
    ) -> Collective:
        """Make a persistent collective on one piece of memory. Collective; call it to run it.

        Parameters
        ----------
        kind : str
            The result in the array: "broadcast" (every member has the array of ``root``), "reduce"
            (``root`` has the sum; the others' arrays are undefined), "reduce-scatter" (member r has
            block r of the sum), "all-gather" (every member has block r of each member r),
            "all-to-all" (member r has block r of every member), "sum", "average". Blocks are those
            of :func:`pgasdl.plans.blocks`; those of all-to-all are equal: count div size elements.
        array, out, group, plan, timeout
            As for :meth:`allreduce_handle`.
        **options : int
            Options of the plan, such as ``root=1``.

        Returns
        -------
        Collective
            ``handle()`` runs it; ``handle.start()`` and ``handle.wait()`` overlap it.

        Raises
        ------
        PlanError
            No such kind, or the plan does not offer it.
        BufferRefused, MismatchError, PeerLost, Timeout
        """
        return Collective(self.state, kind, array, out, group or self.world, plan, timeout, options)

    # --- passive messages

    def passive_send(self, data: Any, peer: int, *, timeout: float | None = None) -> None:
        """Send a message to the thread that calls :meth:`passive_receive` on ``peer``.

        Parameters
        ----------
        data : bytes-like
            Bytes-like, at most ``limits.passive_bytes``.
        peer : int
            Rank, may be this one.
        timeout : float, optional
            Seconds; None: the context's default, 0: one try.

        Raises
        ------
        Timeout
            ``peer`` has not taken this rank's previous message; nothing was sent.
        BufferRefused
            The message is too long.
        PeerLost, RankError

        Notes
        -----
        GASPI: gaspi_passive_send.
        """
        self._world().passive_send(data, peer, timeout)

    def passive_receive(self, *, timeout: float | None = None) -> tuple[int, bytes]:
        """Take the next message from any rank.

        Returns
        -------
        (sender, message)
            Messages of one sender come in order, senders take turns.

        Raises
        ------
        Timeout
            No message came.

        Notes
        -----
        GASPI: gaspi_passive_receive.
        """
        sender, message = self._world().passive_receive(timeout)
        return sender, message

    # --- peers and failures

    def transport_of(self, peer: int) -> str:
        """Return the name of the transport that carries bytes to ``peer``."""
        self._require_usable()
        if not 0 <= operator.index(peer) < self.size:
            raise RankError(f"rank {peer}: ranks are 0 to {self.size - 1}")
        return self.topology.routes.names[peer]

    def health(self) -> tuple[str, ...]:
        """Return every rank's state: "healthy", "died", "stopped", "failed" or "closed".

        The failure detector keeps it, even while this rank computes. GASPI: gaspi_state_vec_get.
        """
        return tuple(self._health())

    def ping(self, peer: int) -> None:
        """Raise PeerLost if ``peer`` is known to be gone. GASPI: gaspi_proc_ping."""
        self._require_peer(peer, "ping")

    def reconnect(self, peer: int) -> None:
        """Give up the connections to ``peer``; the next request makes new ones.

        When the peer's adapter refuses a request (a deleted segment, say), the connection breaks:
        everything that is posted on it fails until this is called. Requests under way are lost.
        Where there are no connections (shm), nothing happens.

        Raises
        ------
        RankError, PeerLost
        """
        self._reconnect(peer)

    def kill(self, peer: int) -> None:
        """Kill another rank's process (SIGKILL). GASPI: gaspi_proc_kill."""
        if peer == self.rank:
            raise RankError(f"rank {peer} is this one; end it by leaving the program")
        pid = self._pid_of(peer)
        if pid == 0:
            raise UnavailableError(f"rank {peer} is a process of another machine")
        if pid == os.getpid():
            raise UnavailableError("the ranks of this job are threads of one process")
        self._kill(peer)

    def survivors(self, *, timeout: float | None = None) -> Group:
        """Accept the losses so far and form a group of the ranks that are left. Collective.

        Before it every wait ends with PeerLost; afterwards waits work again, among survivors.
        """
        while True:
            self._acknowledge()
            states = self._health()
            healthy = [rank for rank, state in enumerate(states) if state == "healthy"]
            self._job.accept(set(range(self.size)).difference(healthy))
            try:
                return self.group(healthy, timeout=timeout)
            except PeerLost:
                # A peer may have reported a loss that this rank notices only now.
                if self._health() == states:
                    raise

    def footprint(self) -> Footprint:
        """Return the library's own memory and connections on this rank, as they are now."""
        return Footprint(self._own_bytes, self.segments.workspace_bytes, *self._connections())

    def counters(self) -> Counters:
        """Return this rank's counters of traffic, registrations, waits and losses since it joined.

        ``ctx.counters() - before`` has the traffic of a piece of a program.

        Notes
        -----
        It counts one-sided operations once they are posted, and collectives, exchanges and
        everything else that plans make once an execution has ended, the same over all transports:
        a Put that is a copy into mapped memory counts as one that an adapter makes. It leaves out
        the library's own messages (start-up, heartbeats, barriers, small collectives of groups),
        passive messages, operations in captured graphs, and what the program itself, or ``send``
        of torch.distributed, loads from mapped memory or stores there. A wait is counted once it
        has ended, unless it was over at once. Any thread may call it.
        """
        peers = tuple(Traffic(*words) for words in self._traffic())
        waits = {cause: Waits(*words) for cause, words in self._waits().items()}
        states = enumerate(self._health())
        lost = sum(rank != self.rank and how not in ("healthy", "closed") for rank, how in states)
        layers = {
            (exchange.number, layer): times
            for exchange in list(self.state.servers)
            for layer, times in enumerate(exchange.times)
        }
        return Counters(peers, self._registrations, waits, lost, layers)

    def openmetrics(self) -> str:
        """Return the counters as text in the format of OpenMetrics 1.0, for a scrape.

        Returns
        -------
        str
            Counters with the prefix ``pgasdl_``, in bytes and seconds, each labelled with the rank:
            ``traffic_bytes`` and ``traffic_messages`` by peer and direction ("write", "read");
            ``notifications`` by peer; ``registrations``; ``waits`` and ``wait_seconds`` by cause;
            ``peers_lost``; ``layer_exchanges`` by exchange and layer, ``layer_seconds`` also by
            state ("computing", "queued", "exchanging", "waiting").

        Notes
        -----
        Five lines for each peer with which there was traffic, five for each layer, and 18 others:
        a rank of 1024 that has written to 20 has some 120.
        """
        return exposition(self.counters(), self.rank)

    def describe(self) -> str:
        """Describe this context, for a log: ranks, transport, limits, plans and inboxes."""
        lines = [
            f"rank {self.rank} of {self.size}, started by {self.launch.kind}",
            f"transport {self.topology.routes}",
            *self._nodes(),
            *self._devices(),
            f"memory on a GPU: {self._gpu_path()}",
            f"policy: {str(self.policy) or 'none, plans are chosen automatically'}",
            f"health: {', '.join(self._health())}",
            str(self.limits),
            str(self.footprint()),
            self._pool.describe(),
            *self._allreduces.describe(),
            *(exchange.describe() for exchange in self.state.servers),
        ]
        return "\n".join(lines)

    def _nodes(self) -> list[str]:
        members = self.world.members
        if not members.several_nodes:
            return []
        if isinstance(members.node_size, int):
            return [f"nodes: {members.nodes} of {members.node_size} ranks, the last may have fewer"]
        return [f"nodes: {members.nodes}, of {', '.join(map(str, members.node_size))} ranks"]

    def _devices(self) -> list[str]:
        state = self._transport_state()
        return [f"RDMA by {state}"] if state else []

    def _gpu_path(self) -> str:
        if missing := _native.cuda_missing():
            return missing
        if why := self._why_unreached(0):
            return f"by way of the host, in pieces of {self.config.gpu_piece} bytes ({why})"
        return "peers reach it"

    def flight_record(self) -> str:
        """Return the last operations of this rank, one a line, with microseconds before now.

        A post has the moment when it was over, a wait that when it, or its last 50 ms, began.
        """
        return self._record()

    def dump_flight_record(self, reason: str) -> None:
        """Write the flight record to ``PGASDL_TRACE``, or to standard error."""
        self._job.dump(self, reason)

    # --- the end

    def close(self, *, failed: bool = False) -> None:
        """Leave the job. Idempotent. Requests that were posted still arrive.

        ``failed``: this rank failed, and the others' waits raise PeerLost.
        """
        if self.closed:
            return
        self._close(failed)
        self._allreduces.clear()
        self.state.clear()
        self._pool.clear()
        self._job.leave(self, failed=failed)

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
