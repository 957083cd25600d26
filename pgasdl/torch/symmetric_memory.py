"""torch's symmetric memory: its verbs, on segments of the host or of a GPU.

>>> import pgasdl
>>> from pgasdl.torch import symmetric_memory as symm_mem
>>> with pgasdl.init() as ctx:            # started by: pgasdl run -n 2 program.py
...     buffer = symm_mem.empty(1024)
...     handle = symm_mem.rendezvous(buffer, ctx)
...     handle.put_signal(dst_rank=(handle.rank + 1) % handle.world_size)
...     handle.wait_signal(src_rank=(handle.rank - 1) % handle.world_size)

Memory on a GPU is in the order of PyTorch's streams: the current stream makes what a program puts
or stores, as all that it enqueues. Signals and barriers are the host's. The host sends one once the
then current stream, and the streams of earlier puts, have done all that was enqueued. When a wait
for one returns, work that any stream gets after that sees the bytes. So signals wait for kernels,
they cannot be captured into a CUDA graph, and kernels can neither send nor receive them.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from pgasdl import _native
from pgasdl.buffers import Memory, as_numpy_dtype
from pgasdl.context import Context, current
from pgasdl.device.names import ordinal_of
from pgasdl.errors import (
    BufferRefusedError,
    ConfigError,
    MismatchError,
    NotificationError,
    PgasTimeoutError,
    SegmentError,
    UnavailableError,
)
from pgasdl.group import Group, Steps
from pgasdl.segment import Segment
from pgasdl.torch import streams
from pgasdl.torch.members import Members, index_of, members_of, own_context
from pgasdl.torch.puts import STAGING_BYTES, Puts, Signals

__all__ = [
    "SymmetricMemory",
    "empty",
    "get_backend",
    "get_signal_pad_size",
    "is_symm_mem_tensor",
    "put_signal",
    "rendezvous",
    "set_signal_pad_size",
    "wait_signal",
]

_WORD = 4  # bytes of a signal pad for each member and channel, as torch has it
_SIGNAL, _TAKEN, _BARRIER = _LANES = range(3)  # of each channel

_signal_pad_size = 9216


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    group: Members | None = None,
) -> Tensor:
    """Allocate a tensor that :func:`rendezvous` takes. Collective, unlike torch's for one machine.

    Parameters
    ----------
    *size : int
        Shape, as one sequence or several numbers; the same on all ranks.
    dtype : torch.dtype, optional
        None: torch's default.
    device : torch.device or str, optional
        "cpu"; a GPU as in "cuda:1"; "cuda": the current one. None: torch's default.
    group : Group or Context, optional
        The ranks that call it, as in :func:`rendezvous`; None: all of this process's context.

    Returns
    -------
    Tensor
        Zeros, in a segment of its own. The memory lives as long as the tensor, its views or its
        handle, and on a GPU until that has done all that was enqueued; where peers do not map it
        (verbs, mpi), until the context is closed.

    Raises
    ------
    UnavailableError
        Another device, one that is not there, or one whose memory peers do not reach.
    BufferRefusedError
        No elements.
    ClosedError
        No ``group``, and this process has no context.
    PgasTimeoutError, PeerLostError, MismatchError
    """
    where = torch.get_default_device() if device is None else torch.device(device)
    why = _why_none(where)
    context, members = members_of(own_context() if group is None else group)
    ordinal = None if why else ordinal_of(where)
    if ordinal is not None:
        why = context._why_unreached(ordinal)
    if why:
        raise UnavailableError(f'device {where}: {why}: pass device="cpu"')
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
    dtype = torch.get_default_dtype() if dtype is None else dtype
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        raise BufferRefusedError(f"a tensor of shape {shape} has no memory to share")
    segment = context.segment(nbytes, device=where, group=members)
    if ordinal is not None:  # unmapped under a stream, it would end this process's use of the GPU
        drained = weakref.finalize(segment, streams.cuda.drain, torch.device(segment.device))
        drained.atexit = False
    return cast(Tensor, segment.torch(dtype, shape=shape))


def rendezvous(tensor: Tensor, group: Members) -> SymmetricMemory:
    """Return the handle of a tensor's memory. Collective at the first call for this memory.

    On a GPU the host then waits for the current stream: peers may read the tensor's content.

    Parameters
    ----------
    tensor : Tensor
        A tensor of :func:`empty`, or a view of one; the same shape and dtype on all ranks.
    group : Group, Context, str or ProcessGroup
        The ranks that exchange signals, all of which called :func:`empty`: a group, or a context
        for all ranks. A group of torch.distributed, or its name, must hold all ranks.

    Returns
    -------
    SymmetricMemory
        The same one for all tensors in this memory, at each call with these members.

    Raises
    ------
    BufferRefusedError
        The tensor is not of :func:`empty`.
    MismatchError
        The memory of another member has another size, shape or dtype, or is another.
    RankError
        A member has no copy of the memory.
    PgasTimeoutError, PeerLostError
    """
    context, members = members_of(group)
    segment = _segment_of(tensor, context)
    if segment is None:
        raise BufferRefusedError("this tensor was not made by symmetric_memory.empty()")
    found = segment.attached.get(members.ranks)
    if found is None:
        for rank in members.ranks:
            segment.nbytes_of(rank)
        found = SymmetricMemory(context, members, segment, f"{tuple(tensor.shape)} {tensor.dtype}")
        segment.attached[members.ranks] = found
    return cast(SymmetricMemory, found)


class SymmetricMemory:
    """Memory that every member of a group has, and signals between them. See :func:`rendezvous`.

    Ranks are places in the group. Every channel has its own signals and barrier, so that threads
    with channels of their own do not disturb each other. A wait ends after ``timeout_ms``; 0: after
    the context's default. A program may use the signal pads as it likes: the verbs here do not.

    Attributes
    ----------
    rank, world_size : int
        Place of this rank, and number of members.
    buffer_size, signal_pad_size : int
        Bytes of the memory and of the signal pad of each member.
    offset : int
        Bytes before the tensor: 0.
    device : torch.device
        Where this rank's memory lies.
    """

    offset = 0
    multicast_ptr = 0

    def __init__(self, context: Context, group: Group, segment: Segment, shape: str) -> None:
        self.group = group
        self.rank, self.world_size = group.rank, group.size
        self.buffer_size = segment.nbytes
        self.signal_pad_size = pad = _signal_pad_size
        self.n_channels = pad // (_WORD * group.size)
        self._segment = segment
        self.device = torch.device(segment.device)
        where = "" if self.device.type == "cpu" else f" on {self.device.type}"
        mine = f"{shape}, {segment.nbytes} bytes{where}, segment {segment.id}, pad {pad}"
        staging = 0 if all(map(segment.address_of, group.ranks)) else STAGING_BYTES
        lanes = len(_LANES) * self.n_channels
        call = f"a rendezvous of {mine}"
        if self.device.type == "cuda":  # before a peer reads
            streams.Enqueued(self.device).finish(context._seconds(None))
        with Steps(context.state.unfinished, group, call, context._seconds(None)) as steps:
            told = steps(lambda: group.allgather("rendezvous", mine.encode(), steps.left))
            if len(set(told)) > 1:
                each = "; ".join(f"rank {r}: {t.decode()}" for r, t in enumerate(told))
                raise MismatchError(f"rendezvous of unequal memory: {each}")
            self._signals = steps(lambda: Signals(context, group, lanes, pad + staging, steps.left))
        self._puts = Puts(context, segment, self._signals.board)

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0
    ) -> Tensor:
        """Return a tensor over the memory of ``rank``, on :attr:`device`.

        Parameters
        ----------
        rank : int
            A member.
        sizes : Sequence[int]
            Shape.
        dtype : torch.dtype
            Any; the memory has none.
        storage_offset : int, default 0
            Elements of ``dtype`` before the tensor.

        Raises
        ------
        RankError
            No such member.
        SegmentError
            The tensor would leave the memory.
        UnavailableError
            The memory of ``rank`` is not mapped here (verbs, mpi): have it put here by
            :meth:`Window.put` or :func:`put_signal`.
        """
        return self._view(self._segment, self.buffer_size, rank, sizes, dtype, storage_offset)

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """``get_buffer(peer, sizes, dtype)``."""
        return self.get_buffer(peer, sizes, dtype)

    def get_signal_pad(
        self,
        rank: int,
        sizes: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        storage_offset: int = 0,
    ) -> Tensor:
        """Return a tensor over the signal pad of ``rank``: zeros at first.

        It lies on the host, also for memory on a GPU: kernels neither signal nor wait through it.

        ``dtype`` None is ``torch.uint32``, and without ``sizes`` it is the whole pad; the rest as
        for :meth:`get_buffer`.
        """
        dtype = torch.uint32 if dtype is None else dtype
        shape = tuple(sizes) or (self.signal_pad_size // dtype.itemsize,)
        board = self._signals.board
        return self._view(board, self.signal_pad_size, rank, shape, dtype, storage_offset)

    @property
    def buffer_ptrs(self) -> list[int]:
        """Where each member's memory begins in this process; 0 where it is not mapped."""
        return list(map(self._segment.address_of, self.group.ranks))

    @property
    def signal_pad_ptrs(self) -> list[int]:
        """Where each member's signal pad begins in this process; 0 where it is not mapped."""
        return list(map(self._signals.board.address_of, self.group.ranks))

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signal ``dst_rank``, once it has taken this rank's last signal on this channel.

        Bytes that this rank has stored in the memory of ``dst_rank``, or put, are there before: on
        a GPU the host waits for the current stream, and for those of earlier puts.

        Parameters
        ----------
        dst_rank : int
            A member.
        channel : int, default 0
            0 <= channel < n_channels.
        timeout_ms : int, default 0
            Milliseconds; 0: the context's default.

        Raises
        ------
        PgasTimeoutError
            The last signal was not taken, or a stream of the GPU is not so far; nothing was sent.
        RankError, NotificationError
            No such member or channel.
        UnavailableError
            The current stream is captured into a CUDA graph.
        PeerLostError
        """
        self._put_signal(None, dst_rank, channel, timeout_ms)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for a signal of ``src_rank`` on this channel, and take it.

        Work that any stream gets after that sees the bytes that ``src_rank`` put before.

        Parameters and errors are those of :meth:`put_signal`.
        """
        signals, src = self._signals, index_of(src_rank, self.world_size)
        signal, taken = self._lane(channel, _SIGNAL), self._lane(channel, _TAKEN)
        seconds = self._seconds(timeout_ms)
        try:
            signals.wait(signal, src, signals.sent(taken, src) + 1, seconds)
        except PgasTimeoutError:
            raise PgasTimeoutError(
                f"wait_signal: no signal of {signals.name(src)} on channel {channel} within "
                f"{seconds:g} s"
            ) from None
        signals.answer(taken, src, seconds)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait until every member is in the barrier of this channel. Collective.

        Bytes that any member has stored or put before are there afterwards. On a GPU the host waits
        for streams first, as in :meth:`put_signal`.

        Raises
        ------
        PgasTimeoutError
            Names a member that is missing, or the GPU; the next call continues this barrier.
        NotificationError, UnavailableError, PeerLostError
            As for :meth:`put_signal`.
        """
        seconds = self._seconds(timeout_ms)
        lane, rounds = self._lane(channel, _BARRIER), 1 if self.group.mapped else 2
        self._puts.settle(seconds)
        try:
            self._signals.meet(lane, rounds, seconds)
        except PgasTimeoutError as error:
            raise PgasTimeoutError(
                f"barrier, channel {channel}: {error} after {seconds:g} s"
            ) from None

    def _put_signal(
        self, source: Tensor | None, dst_rank: int, channel: int = 0, timeout_ms: int = 0
    ) -> None:
        signals, dst = self._signals, index_of(dst_rank, self.world_size)
        signal, taken = self._lane(channel, _SIGNAL), self._lane(channel, _TAKEN)
        seconds = self._seconds(timeout_ms)
        try:
            signals.wait(taken, dst, signals.sent(signal, dst), seconds)
        except PgasTimeoutError:
            raise PgasTimeoutError(
                f"put_signal: {signals.name(dst)} has not taken the last signal of rank "
                f"{self.rank} on channel {channel} within {seconds:g} s; nothing was sent"
            ) from None
        finish = source is not None and self._puts.put(source, self.group.ranks[dst], 0, seconds)
        self._puts.settle(seconds)
        signals.send(signal, dst, seconds)
        if finish:
            finish(seconds)

    def _view(
        self,
        segment: Segment,
        nbytes: int,
        rank: int,
        sizes: Sequence[int],
        dtype: torch.dtype,
        storage_offset: int,
    ) -> Tensor:
        member = index_of(rank, self.world_size)
        shape, begin = tuple(sizes), operator.index(storage_offset) * dtype.itemsize
        end = begin + math.prod(shape) * dtype.itemsize
        if begin < 0 or end > nbytes or min(shape, default=0) < 0:
            raise SegmentError(
                f"{dtype} of shape {shape} at element {storage_offset} leaves the {nbytes} bytes"
            )
        peer = None if member == self.rank else self.group.ranks[member]
        return cast(Tensor, segment.torch(dtype, begin, shape, peer=peer))

    def _lane(self, channel: int, which: int) -> int:
        if not 0 <= operator.index(channel) < self.n_channels:
            raise NotificationError(
                f"channel {channel}: channels are 0 to {self.n_channels - 1}; there are more with "
                "set_signal_pad_size()"
            )
        return operator.index(channel) * len(_LANES) + which

    def _seconds(self, timeout_ms: int) -> float:
        return self._signals.seconds(timeout_ms / 1000 if timeout_ms else None)

    def __repr__(self) -> str:
        return f"<SymmetricMemory rank {self.rank} of {self.world_size}, {self.buffer_size} bytes>"


def put_signal(src: Tensor, hdl: SymmetricMemory, peer: int) -> None:
    """Copy ``src`` to the beginning of ``peer``'s memory, then signal it on channel 0.

    It waits first until ``peer`` has taken the last signal; ``src`` may change once it returns.

    Parameters
    ----------
    src : Tensor
        Contiguous; any tensor on the host or a GPU.
    hdl : SymmetricMemory
        The memory.
    peer : int
        A member.

    Raises
    ------
    SegmentError
        ``src`` is larger than the memory.
    BufferRefusedError, RankError, PgasTimeoutError, PeerLostError
    """
    hdl._put_signal(src, peer)


def wait_signal(hdl: SymmetricMemory, peer: int) -> None:
    """Wait for a :func:`put_signal` of ``peer``: ``hdl.wait_signal(peer)``."""
    hdl.wait_signal(peer)


def is_symm_mem_tensor(tensor: Tensor) -> bool:
    """Whether :func:`rendezvous` takes ``tensor``, with groups of this process's context."""
    context = current()
    return context is not None and _segment_of(tensor, context) is not None


def get_backend(device: torch.device | str) -> str | None:
    """Return who allocates for a device: "pgasdl", or None where :func:`empty` refuses it.

    That is so for other devices than the CPU and CUDA's, and for CUDA's where this process has no
    GPU, or a PyTorch without CUDA.
    """
    return None if _why_none(torch.device(device)) else "pgasdl"


def set_signal_pad_size(size: int) -> None:
    """Set the bytes of later handles' signal pads, the same on all ranks.

    A handle has a channel for every 4 bytes per member.
    """
    global _signal_pad_size  # noqa: PLW0603
    if size < _WORD:
        raise ConfigError(f"a signal pad of {size} bytes: at least {_WORD} for each member")
    _signal_pad_size = size


def get_signal_pad_size() -> int:
    """Return the bytes of the signal pads of later handles."""
    return _signal_pad_size


def _why_none(device: torch.device) -> str:
    """Why there is no memory on a device; empty: there may be."""
    if device.type == "cpu":
        return ""
    if device.type != "cuda":
        return "symmetric memory is the host's or CUDA's"
    return _native.cuda_missing() if torch.version.cuda else "this PyTorch has no CUDA"


def _segment_of(tensor: Tensor, context: Context) -> Segment | None:
    """Return the segment that a tensor's storage is, if it is one."""
    if tensor.device.type not in ("cpu", "cuda"):
        return None
    storage, byte = tensor.untyped_storage(), as_numpy_dtype("uint8")
    whole = Memory(storage.data_ptr(), storage.nbytes(), byte, (storage.nbytes(),), storage)
    segment, offset = context.segments.at(whole)
    made_by_empty = segment is not None and offset == 0 and not (segment.pooled or segment.bound)
    return segment if made_by_empty else None
