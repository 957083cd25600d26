"""The context: one rank of a job."""

from __future__ import annotations

import logging
import operator
import os
import secrets
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pgasdl import _native, flight
from pgasdl.allreduce import AllreduceCache
from pgasdl.bootstrap import Store
from pgasdl.buffers import memory_of
from pgasdl.collective import Workspace
from pgasdl.config import Config
from pgasdl.errors import PeerLost, PlanError, RankError, Timeout, UnavailableError
from pgasdl.formation import Formation
from pgasdl.group import Group
from pgasdl.handle import Collective, kind_of
from pgasdl.launch.detect import Launch
from pgasdl.plans import outside
from pgasdl.policy import load
from pgasdl.routes import Place, Routes, choose, require_one_choice
from pgasdl.segment import Segment, SegmentTable

if TYPE_CHECKING:
    from pgasdl.exchange import GradientExchange

log = logging.getLogger("pgasdl")

PASSIVE_BYTES = 65536
CROWDED_YIELD_US = 20_000


@dataclass(frozen=True, slots=True)
class Limits:
    """What a context admits.

    Attributes
    ----------
    notifications : of a segment that names no number; any segment may have up to 2**28
    queues, queue_depth : queues at once; requests in one between two waits
    list_elements : transfers in one list operation
    passive_bytes : longest passive message
    allreduce_bytes : largest piece of :meth:`Group.allreduce` that travels at once
    """

    notifications: int
    queues: int
    queue_depth: int
    list_elements: int = 65536
    passive_bytes: int = PASSIVE_BYTES
    allreduce_bytes: int = 8192


class Context(_native.ContextCore):
    """One rank of a job. Made by :func:`init`; use it in a ``with`` statement.

    The one-sided operations (``write``, ``write_notify``, ``notify_waitsome`` ...) may be called
    from any thread. Leaving the ``with`` block closes the context; leaving it by an exception tells
    the other ranks, whose waits then end with :class:`PeerLost`.
    """

    def __init__(
        self,
        config: Config,
        launch: Launch,
        store: Store,
        world: _native.LoopbackWorld | None = None,
        mapped: bool = True,
        mpi: _native.MpiWorld | None = None,
    ) -> None:
        self._loopback_mapped = mapped
        self.config = config
        self.launch = launch
        self._store = store
        self._world_of_threads = world
        outside.load(config.plan_modules or "")
        self.policy = load(config.policy or "")
        asked = "loopback" if world is not None else config.transport
        plans = ", ".join(outside.names())
        place = Place.here(launch, config, asked, str(self.policy), plans, mpi is not None)
        places = list(map(Place.decoded, store.exchange("place", place.encoded(), config.timeout)))
        self.hosts = tuple(place.host for place in places)
        created = any(place.created for place in places)
        self._near = mpi.near if mpi is not None and not created else set()
        require_one_choice(launch.rank, places)
        if world is None:
            self.routes = choose(launch.rank, places)
        else:
            self.routes = Routes(("loopback",) * launch.size, "threads of one process")
        # With fewer cores than ranks, whoever spins keeps the rank it waits for from running, and
        # whoever sleeps is woken late: a wait gives its core away, again and again.
        self.crowded = any(place.crowded for place in places)
        if launch.rank == 0:
            store.put("token", secrets.token_bytes(16))
        token = store.get("token", owner=0)
        super().__init__(
            launch.rank,
            launch.size,
            list(self.routes.names),
            token,
            world,
            timeout=config.timeout,
            queue_depth=config.queue_depth,
            queues=config.queues,
            passive_bytes=PASSIVE_BYTES,
            spin_us=0 if self.crowded else config.spin_us,
            yield_us=max(config.yield_us, CROWDED_YIELD_US) if self.crowded else config.yield_us,
            heartbeat_ms=config.heartbeat_ms,
            stopped_after=config.stopped_after,
            verbs_device=config.verbs_device,
            verbs_port=config.verbs_port,
            verbs_gid=config.verbs_gid,
            mpi=mpi,
            mpi_created=config.mpi_windows == "created",
        )
        self._connect(store.exchange("endpoint", self._endpoint()))
        self._join(store.exchange("world", self._open()), config.timeout)
        self.world = Group(self, self._world())
        self._formation = Formation(self, store)
        self._workspaces: dict[tuple[int, ...], Workspace] = {}
        self._allreduces = AllreduceCache(self)
        self.segments = SegmentTable(self._allreduces.forget)
        self.exchanges: list[GradientExchange] = []
        if config.progress == "thread":
            _native.progress_thread(self, True)
        self.world.barrier(config.timeout)
        log.info(
            "rank %d of %d: %s",
            self.rank,
            self.size,
            self.routes,
        )

    @property
    def limits(self) -> Limits:
        """What this context admits."""
        config = self.config
        return Limits(config.notifications, config.queues, config.queue_depth)

    # --- memory

    def segment(
        self,
        nbytes: int,
        *,
        device: str = "cpu",
        notifications: int | None = None,
        group: Group | None = None,
        timeout: float | None = None,
    ) -> Segment:
        """Create memory that every member of a group can write to. Collective.

        Parameters
        ----------
        nbytes : of this rank's copy, 0 <= nbytes; ranks may differ. Zero-filled, page-aligned
        device : "cpu"
        notifications : of this rank's copy; None: ``limits.notifications``
        group : None: all ranks
        timeout : seconds; None: the context's default. After a Timeout the same call continues

        Raises
        ------
        Timeout         names the ranks that have not called it
        MismatchError   a rank is in another collective
        SegmentError, NotificationError   impossible sizes
        UnavailableError   a device that is not to be had

        Notes
        -----
        A sealed memfd, without a name in any file system: nothing is left after kill -9. Where
        peers do not map it (verbs), it lives until it is deleted: nothing tells when they are done.
        GASPI: gaspi_segment_create.
        """
        if device != "cpu":
            raise UnavailableError(f'device {device!r}: segments are host memory so far ("cpu")')
        number = self.config.notifications if notifications is None else notifications
        segment = Segment(group or self.world, nbytes, number, timeout=timeout)
        self.segments.add(segment)
        if not (group or self.world).mapped:
            self.segments.keep(segment)
        return segment

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
        buffer : contiguous, writable host memory: array, tensor, anything with the buffer protocol.
            It is kept alive, and must not be resized, until the segment is deleted
        notifications, group, timeout : as for :meth:`segment`

        Raises
        ------
        BufferRefused   strided, read-only, on a device, or no memory
        UnavailableError   when a peer may not reach this process's memory (on first use)

        Notes
        -----
        Peers reach it by process_vm_writev and process_vm_readv (shm), not by loads and stores:
        plans that need mapped memory refuse it. GASPI: gaspi_segment_bind, gaspi_segment_use.
        """
        memory = memory_of(buffer)
        number = self.config.notifications if notifications is None else notifications
        if memory.nbytes == 0:
            return Segment(group or self.world, 0, number, timeout=timeout)
        segment = Segment(
            group or self.world, memory.nbytes, number, memory.owner, memory.address, timeout
        )
        self.segments.keep(segment)
        return segment

    @property
    def mapped(self) -> bool:
        """Whether every rank can load from and store to every other's segments."""
        return self.world.mapped

    def maps(self, ranks: Sequence[int]) -> bool:
        """Whether each of ``ranks``, this one among them, maps segments of theirs; known alike."""
        if self.routes.names[self.rank] == "mpi":  # windows are shared by all members, or by none
            return self._near.issuperset(ranks)
        one_host = len({self.hosts[rank] for rank in ranks}) == 1
        return one_host and self.mapped_inside

    @property
    def mapped_inside(self) -> bool:
        """Whether ranks on one machine do so whatever group they are in; the same on all ranks."""
        if self._world_of_threads is not None:
            return self._loopback_mapped
        return self.routes.names[self.rank] == "shm"

    def workspace(self, group: Group, timeout: float | None = None) -> Workspace:
        """The group's own memory for collectives; made by the first that needs it. Collective."""
        found = self._workspaces.get(group.ranks)
        if found is None:
            found = self._workspaces[group.ranks] = Workspace(self, group, timeout)
        return found

    # --- groups and collectives

    def group(self, ranks: Iterable[int], *, timeout: float | None = None) -> Group:
        """Form a group. Collective over its members only.

        Parameters
        ----------
        ranks : the members, this rank among them
        timeout : seconds; None: the context's default. After a Timeout the same call continues

        Raises
        ------
        RankError   no such rank, a rank twice, or this rank is not among them
        Timeout     names the rank that has not called it
        PeerLost    a member is gone

        Notes
        -----
        GASPI: gaspi_group_create, gaspi_group_add, gaspi_group_commit.
        """
        members = tuple(sorted(ranks))
        self._require_usable()
        for member in members:
            self._require_peer(member, "group")
        return self._formation.form(members, self.timeout if timeout is None else timeout)

    def barrier(self, timeout: float | None = None) -> None:
        """``world.barrier``: wait until every rank is here."""
        self.world.barrier(timeout)

    def allreduce(
        self,
        array: Any,
        op: str = "mean",
        *,
        group: Group | None = None,
        plan: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Replace every rank's array by the mean (or sum) of all. Collective.

        Parameters
        ----------
        array : contiguous and writable, same size and dtype on all ranks: array, tensor, or a
            segment slice (float32). float32, float64, float16, bfloat16, int32, int64
        op : "mean" or "sum"; integers can be summed only
        group : None: all ranks
        plan : name of an algorithm; None: chosen by size
        timeout : seconds; None: the context's default

        Returns
        -------
        ``array``, with the same bits on every rank and in every run

        Raises
        ------
        BufferRefused   strided, read-only, or a dtype that is not reduced
        MismatchError   a rank is in another collective, or came with another size or dtype
        PeerLost, Timeout

        Notes
        -----
        Plans and handles are kept, so the first call of a size costs more. Arrays inside segments
        are reduced in place; others pass through a workspace. Best of all is a handle of one's own:
        :meth:`allreduce_handle`.
        """
        self._allreduces.run(array, op, group or self.world, plan, timeout)
        return array

    def allreduce_handle(
        self,
        array: Any,
        op: str = "mean",
        *,
        group: Group | None = None,
        plan: str | None = None,
        timeout: float | None = None,
        out: Any = None,
        **options: int,
    ) -> Collective:
        """A persistent allreduce of one piece of memory. Collective; call it to run it.

        Parameters
        ----------
        array : a view of a segment (``segment.numpy("f32")``), or any array or tensor
        op, group, plan, timeout : as for :meth:`allreduce`
        out : where the result goes; None: into ``array``
        options : of the plan, such as ``chunks=8``

        Returns
        -------
        Collective : ``handle()`` runs it; ``handle.start()`` and ``handle.wait()`` overlap it
        """
        kind = kind_of(op)
        return Collective(self, kind, array, out, group or self.world, plan, timeout, options)

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
        """A persistent collective on one piece of memory. Collective; call it to run it.

        Parameters
        ----------
        kind : what it leaves in the array: "broadcast" (everybody has what ``root`` had), "reduce"
            (``root`` has the sum, others what happens to be there), "reduce-scatter" (member r has
            block r of the sum), "all-gather" (everybody has block r of member r), "all-to-all"
            (member r has block r of everybody), "sum", "average". Blocks are those of
            :func:`pgasdl.plans.blocks`; all-to-all has equal ones, of count div size elements
        array, out, group, plan, timeout : as for :meth:`allreduce_handle`
        options : of the plan, such as ``root=1``

        Returns
        -------
        Collective : ``handle()`` runs it; ``handle.start()`` and ``handle.wait()`` overlap it

        Raises
        ------
        PlanError   no such kind, or a plan that does not offer it
        BufferRefused, MismatchError, PeerLost, Timeout
        """
        return Collective(self, kind, array, out, group or self.world, plan, timeout, options)

    def serve_calls(self) -> None:
        """Run the updates that exchanges are waiting for on this rank."""
        while (call := _native.take_call(self)) is not None:
            if not any(exchange.serve(call) for exchange in self.exchanges):
                raise PlanError(f"nobody answers a call of {call.hook!r}")
            _native.answer(self, call)

    # --- passive messages

    def passive_send(self, data: Any, peer: int, *, timeout: float | None = None) -> None:
        """Send a message to whoever calls :meth:`passive_receive` on ``peer``.

        Parameters
        ----------
        data : bytes-like, at most ``limits.passive_bytes``
        peer : rank, may be this one
        timeout : seconds; None: the context's default, 0: one try

        Raises
        ------
        Timeout   ``peer`` has not taken this rank's previous message; nothing was sent
        BufferRefused   the message is too long
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
        (sender, message) : messages of one sender come in order, senders take turns

        Raises
        ------
        Timeout   there is none

        Notes
        -----
        GASPI: gaspi_passive_receive.
        """
        sender, message = self._world().passive_receive(timeout)
        return sender, message

    # --- who is there

    def transport_of(self, peer: int) -> str:
        """The name of the transport that carries bytes to ``peer``."""
        self._require_usable()
        if not 0 <= operator.index(peer) < self.size:
            raise RankError(f"rank {peer}: ranks are 0 to {self.size - 1}")
        return self.routes.names[peer]

    def health(self) -> tuple[str, ...]:
        """The state vector: "healthy", "died", "stopped", "failed" or "closed" for every rank.

        Kept by the failure detector, whatever this rank is doing. GASPI: gaspi_state_vec_get.
        """
        return tuple(self._health())

    def ping(self, peer: int) -> None:
        """Raise PeerLost if ``peer`` is known to be gone. GASPI: gaspi_proc_ping."""
        self._require_peer(peer, "ping")

    def reconnect(self, peer: int) -> None:
        """Give up the connections to ``peer``; the next request makes them anew.

        After a request was refused by the peer's adapter (a deleted segment, say) its connection is
        broken, and everything posted on it fails until this is called. What was under way is lost.
        Nothing happens where there are no connections (shm).

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
        os.kill(pid, signal.SIGKILL)

    def survivors(self, *, timeout: float | None = None) -> Group:
        """Accept the losses so far and form a group of the ranks that are left. Collective.

        Until then every wait ends with PeerLost; afterwards waits work again, among survivors.
        """
        self._acknowledge()
        states = self._health()
        healthy = [rank for rank, state in enumerate(states) if state == "healthy"]
        self._formation.accepted = frozenset(range(self.size)).difference(healthy)
        return self.group(healthy, timeout=timeout)

    def describe(self) -> str:
        """What this context is made of, for a log: ranks, transport, limits, plans and inboxes."""
        lines = [
            f"rank {self.rank} of {self.size}, started by {self.launch.kind}",
            f"transport {self.routes}",
            f"policy: {str(self.policy) or 'none, plans are chosen automatically'}",
            f"health: {', '.join(self._health())}",
            str(self.limits),
            *self._allreduces.describe(),
            *(exchange.describe() for exchange in self.exchanges),
        ]
        return "\n".join(lines)

    def flight_record(self) -> str:
        """The last operations of this rank, one a line, with microseconds before now."""
        return self._record()

    # --- the end

    def close(self, *, failed: bool = False) -> None:
        """Leave the job; idempotent. What was posted still arrives.

        ``failed`` tells the others that this rank did not end in peace: their waits then raise
        PeerLost.
        """
        if self.closed:
            return
        self._close(failed)
        if "mpi" in self.routes.names:
            from pgasdl.mpi import note_losses

            note_losses(self)
        # Their NumPy views of segments would keep the context in a cycle that is never collected.
        self._workspaces.clear()
        self._allreduces.clear()
        self.exchanges.clear()
        self.segments.kept.clear()
        # Ranks in one process share a store object that must outlive them.
        self._store.close(drain=0.0 if failed else 5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, (Timeout, PeerLost)):
            flight.dump(self, f"after {type(error).__name__}: {error}")
        if error is not None:
            flight.tell_elastic(error)
        in_peace = error is None or (isinstance(error, SystemExit) and not error.code)
        self.close(failed=not in_peace)

    def __repr__(self) -> str:
        if not hasattr(self, "world"):  # debuggers and error reporters ask while it is made
            return "<Context, not joined>"
        state = "closed" if self.closed else "/".join(sorted(set(self.routes.names)))
        return f"<Context rank {self.rank} of {self.size}, {state}>"
