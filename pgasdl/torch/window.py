"""``pgasdl.torch.Window``: tensors of all ranks, which each of them writes to."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from typing import cast

import torch
from torch import Tensor

from pgasdl.buffers import memory_of
from pgasdl.errors import (
    BufferRefusedError,
    ClosedError,
    MismatchError,
    PgasTimeoutError,
    SegmentError,
    UnavailableError,
)
from pgasdl.group import Steps
from pgasdl.torch import streams
from pgasdl.torch.members import Members, index_of, members_of
from pgasdl.torch.puts import STAGING_BYTES, Finish, Puts, Signals

_SIGNAL, _END = _LANES = range(2)

Time = timedelta | float | None


class WindowAccessType(Enum):
    """How this rank reaches a member's window."""

    UNIFIED = 0
    """By loads and stores: it is mapped."""

    SEPARATE = 1
    """By :meth:`Window.put` only."""


@dataclass(frozen=True, slots=True)
class WindowAttr:
    """The result of :meth:`Window.get_attr`."""

    access_type: WindowAccessType


class Work:
    """Something begun; :meth:`wait` ends it."""

    def __init__(self, finish: Finish | None) -> None:
        self._finish = finish

    def wait(self, timeout: Time = None) -> bool:
        """Wait for it; after a timeout the next call continues. True."""
        if self._finish is not None:
            self._finish(_seconds(timeout))
            self._finish = None
        return True

    def is_completed(self) -> bool:
        """Whether a :meth:`wait` has returned, or none is needed."""
        return self._finish is None


@dataclass(frozen=True, slots=True)
class _Place:
    """A member's tensor: where it lies in its copy of the segment."""

    offset: int
    count: int
    shape: Sequence[int]
    dtype: str
    kind: str  # of device
    segment: Sequence[int]  # id and members of a segment that was there before; or nothing


class Window:
    """Tensors of all members, which each of them writes to, with signals. As torch's.

    Ranks are places in the group. Signals count: a member may send several before the other waits,
    and each ends one wait. A signal overtakes no earlier ``put`` to the same member. One thread at
    a time waits for a member's signals.

    On a GPU the current stream makes a put, as any copy of PyTorch's. A signal is the host's: it
    waits until the stream that is then current, and those of earlier puts, have done all that was
    enqueued; so its reads of this window and its stores into others are over, too. After
    :meth:`wait_signal` the work that any stream gets sees the bytes. Neither can be captured into a
    CUDA graph.

    Parameters
    ----------
    group : Group, Context, str or ProcessGroup
        The members, as for :func:`symmetric_memory.rendezvous`.
    tensor : Tensor, optional
        Registered at once; the call is collective then.
    timeout : timedelta or float, optional
        Seconds that each call waits at most; None: the context's default.
    """

    def __init__(self, group: Members, tensor: Tensor | None = None, timeout: Time = None) -> None:
        self._context, self.group = members_of(group)
        self._timeout = _seconds(timeout)
        self._tensor: Tensor | None = None
        if tensor is not None:
            self.tensor_register(tensor)

    def tensor_register(self, tensor: Tensor, owning: bool = True) -> None:
        """Make ``tensor`` this rank's part of the window. Collective.

        Parameters
        ----------
        tensor : Tensor
            Contiguous; shapes and dtypes may differ. On the host on all members, or on a GPU on
            all. Members map each other's tensors if all lie in one segment, as those of
            :func:`symmetric_memory.empty`; others are bound (:meth:`Context.bind`), and then mapped
            on GPUs only.
        owning : bool, default True
            As torch has it; in both cases the tensor lives until :meth:`tensor_deregister`.

        Raises
        ------
        BufferRefusedError
            Strided, or neither on the host nor on a GPU.
        ClosedError
            The window has a tensor already.
        UnavailableError
            A peer may not reach this process's memory; raised on first use. At once: peers reach no
            memory of this GPU, or it is of an allocator that cannot share it (cudaMallocAsync).
        MismatchError
            Some are on the host, others on GPUs; or a member is in another collective.
        PgasTimeoutError, PeerLostError
        """
        if self._tensor is not None:
            raise ClosedError("this window has a tensor: tensor_deregister() comes first")
        context, group = self._context, self.group
        memory = memory_of(tensor.detach(), device=True)
        home, offset = context.segments.at(memory)
        if home is not None and (home.bound or not set(group.ranks) <= set(home.group.ranks)):
            home = None
        where = () if home is None else (home.id, *home.group.ranks)
        what = [tensor.numel(), list(tensor.shape), str(tensor.dtype), tensor.device.type]
        mine = [offset if home else 0, *what, where]
        seconds = context._seconds(self._timeout)
        if memory.device is not None:
            if why := context._why_unreached(memory.device):
                raise UnavailableError(f"a window on {tensor.device}: {why}: let it be on the host")
            streams.Enqueued(tensor.device).finish(seconds)  # before a peer puts
        call = f"tensor_register of {memory.nbytes} bytes at {memory.address:#x}"
        with Steps(context.state.unfinished, group, call, seconds) as steps:
            told = steps(lambda: group.allgather("window", json.dumps(mine).encode(), steps.left))
            places = [_Place(*json.loads(blob)) for blob in told]
            if len({place.kind for place in places}) > 1:
                each = ", ".join(f"rank {r}'s is on {p.kind}" for r, p in enumerate(places))
                raise MismatchError(
                    f"tensors of one window: {each}; let all be on the host, or all on GPUs"
                )
            self._bound = home is None or any(p.segment != places[0].segment for p in places)
            if self._bound:
                # A segment of no bytes cannot be bound.
                raw = tensor.detach() if memory.nbytes else tensor.new_zeros(1, dtype=torch.uint8)
                home = steps(
                    lambda: context.bind(raw, notifications=0, group=group, timeout=steps.left)
                )
                places = [replace(place, offset=0) for place in places]
            assert home is not None
            staging = 0 if all(map(home.address_of, group.ranks)) else STAGING_BYTES
            self._signals = steps(lambda: Signals(context, group, len(_LANES), staging, steps.left))
        self._segment, self._places = home, places
        self._puts = Puts(context, home, self._signals.board)
        self._taken = [0] * group.size
        self._tensor = tensor

    def tensor_deregister(self) -> None:
        """Take this rank's tensor out of the window, once all puts are there. Collective.

        Signals that were not waited for are lost.

        On a GPU the host waits for streams, as before a :meth:`signal`.

        Raises
        ------
        PgasTimeoutError
            Names a member that has not called it, or the GPU; the next call continues.
        ClosedError, PeerLostError
        """
        self._require()
        seconds = self._context._seconds(self._timeout)
        self._puts.settle(seconds)
        try:
            self._signals.meet(_END, 1, seconds)
        except PgasTimeoutError as error:
            raise PgasTimeoutError(f"tensor_deregister: {error} after {seconds:g} s") from None
        self._signals.close()
        if self._bound:
            self._segment.close()
        self._tensor = None

    def put(
        self,
        tensor: Tensor,
        dst_rank: int,
        target_offset_nelems: int,
        async_op: bool = False,
        timeout: Time = None,
    ) -> Work:
        """Copy ``tensor`` into the window of ``dst_rank``.

        Parameters
        ----------
        tensor : Tensor
            Contiguous, of the dtype of the window there; on the host or a GPU, wherever that lies.
        dst_rank : int
            A member, may be this one.
        target_offset_nelems : int
            Elements before it in the window there.
        async_op : bool, default False
            ``tensor`` may change only after ``wait()`` of the result. On a GPU the copy is enqueued
            either way, and ``wait()`` lets the current stream wait for it.
        timeout : timedelta or float, optional
            Seconds; None: the window's.

        Returns
        -------
        Work
            Only :meth:`signal` says that the bytes are there.

        Raises
        ------
        SegmentError
            It would leave the window there.
        BufferRefusedError
            Strided, or of another dtype.
        ClosedError
            The window has no tensor.
        PgasTimeoutError, QueueFullError, PeerLostError
            A part of it may be there.
        UnavailableError
            The current stream is captured into a CUDA graph.
        RankError
        """
        dst = self._require(dst_rank)
        place, first = self._places[dst], operator.index(target_offset_nelems)
        if str(tensor.dtype) != place.dtype:
            raise BufferRefusedError(
                f"put of {tensor.dtype} into the window of rank {dst}, which has {place.dtype}"
            )
        if first < 0 or first + tensor.numel() > place.count:
            raise SegmentError(
                f"put of {tensor.numel()} elements at element {first} leaves the window of rank "
                f"{dst}, which has {place.count}"
            )
        offset = place.offset + first * tensor.dtype.itemsize
        seconds = self._seconds(timeout)
        finish = self._puts.put(tensor, self.group.ranks[dst], offset, seconds)
        return Work(None) if finish is None else self._begun(finish, seconds, async_op)

    def signal(self, peer_rank: int, async_op: bool = False, timeout: Time = None) -> Work:
        """Signal ``peer_rank``, after all that this rank has put there.

        Parameters
        ----------
        peer_rank : int
            A member, may be this one.
        async_op : bool, default False
            Makes no difference: a signal is always posted before this returns, on a GPU once its
            streams have come so far.
        timeout : timedelta or float, optional
            Seconds; None: the window's.

        Raises
        ------
        PgasTimeoutError
            No signal was sent: no room for it, or a stream of the GPU is not so far.
        UnavailableError
            The current stream is captured into a CUDA graph.
        ClosedError, RankError, QueueFullError, PeerLostError
        """
        peer, seconds = self._require(peer_rank), self._seconds(timeout)
        self._puts.settle(seconds)
        self._signals.send(_SIGNAL, peer, seconds)
        return Work(None)

    def wait_signal(self, peer_rank: int, async_op: bool = False, timeout: Time = None) -> Work:
        """Wait for the next signal of ``peer_rank``.

        Parameters
        ----------
        peer_rank : int
            A member.
        async_op : bool, default False
            Wait in ``wait()`` of the result.
        timeout : timedelta or float, optional
            Seconds; None: the window's.

        Raises
        ------
        PgasTimeoutError
            Names the member.
        ClosedError, RankError, PeerLostError
        """
        peer = self._require(peer_rank)

        def finish(timeout: float | None) -> None:
            seconds = self._context._seconds(timeout)
            try:
                self._signals.wait(_SIGNAL, peer, self._taken[peer] + 1, seconds)
            except PgasTimeoutError:
                raise PgasTimeoutError(
                    f"wait_signal: no signal of {self._signals.name(peer)} within {seconds:g} s"
                ) from None
            self._taken[peer] += 1

        return self._begun(finish, self._seconds(timeout), async_op)

    def map_remote_tensor(self, rank: int) -> Tensor:
        """Return a view of the window of ``rank``, which may be this one.

        Raises
        ------
        UnavailableError
            It is not mapped here: :meth:`get_attr` says so before.
        ClosedError, RankError
        """
        member = self._require(rank)
        if member == self.group.rank:
            assert self._tensor is not None
            return self._tensor
        place = self._places[member]
        if self.get_attr(rank).access_type is WindowAccessType.SEPARATE:
            raise UnavailableError(
                f"the window of rank {member} is not mapped here: have it put here, or register "
                "tensors of symmetric_memory.empty() on ranks of one machine"
            )
        dtype = getattr(torch, place.dtype.removeprefix("torch."))
        return cast(
            Tensor,
            self._segment.torch(
                dtype, place.offset, tuple(place.shape), peer=self.group.ranks[member]
            ),
        )

    def get_attr(self, peer_rank: int) -> WindowAttr:
        """Return how this rank reaches the window of ``peer_rank``."""
        peer = self._require(peer_rank)
        mapped = peer == self.group.rank or self._segment.address_of(self.group.ranks[peer])
        return WindowAttr(WindowAccessType.UNIFIED if mapped else WindowAccessType.SEPARATE)

    def _require(self, member: int = 0) -> int:
        if self._tensor is None:
            raise ClosedError("this window has no tensor: tensor_register() comes first")
        return index_of(member, self.group.size)

    def _seconds(self, timeout: Time) -> float | None:
        return self._timeout if timeout is None else _seconds(timeout)

    @staticmethod
    def _begun(finish: Finish, seconds: float | None, async_op: bool) -> Work:
        work = Work(lambda timeout: finish(seconds if timeout is None else timeout))
        if not async_op:
            work.wait()
        return work

    def __repr__(self) -> str:
        what = "no tensor" if self._tensor is None else f"{tuple(self._tensor.shape)}"
        return f"<Window rank {self.group.rank} of {self.group.size}, {what}>"


def _seconds(timeout: Time) -> float | None:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
