"""Segments: memory that all ranks of a group can write to, on the host or on a GPU."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pgasdl import _native
from pgasdl.buffers import Memory, as_numpy_dtype, memory_of
from pgasdl.device.names import name_of
from pgasdl.device.streams import stream_handle
from pgasdl.device.views import DeviceBytes, cupy_view, torch_view
from pgasdl.errors import AlignmentError, SegmentError, UnavailableError
from pgasdl.group import Group
from pgasdl.kernel import memory_limit, ptrace_scope

log = logging.getLogger("pgasdl")

_HOST = -1  # the core's number of the host
_NOTIFICATION_BYTES = 4
_GIB = 1 << 30


class Segment(_native.SegmentCore):
    """Memory that all members of a group can write to, read from and raise notifications on.

    Made by :meth:`Context.segment` and :meth:`Context.bind`, collectively. ``segment[a:b]`` names
    bytes a to b: of this rank's copy as a source, of a peer's as a target. Sizes may differ
    between ranks. Views (:meth:`numpy`, :meth:`torch`, DLPack, the buffer protocol; on a GPU
    :meth:`torch`, :meth:`cupy`, DLPack, ``__cuda_array_interface__``) share the memory and keep it
    alive. :meth:`close`, or a ``with`` statement, gives the copy up.

    Attributes
    ----------
    group : Group
        Its members.
    attached : dict[Hashable, object]
        Objects that live as long as this rank's copy and its views, by their makers' keys.
    pooled : bool
        Arrays are cut from it (:meth:`Context.pool`), by each rank where it likes.
    workspace : bool
        It is memory of the library's own.
    """

    def __init__(
        self,
        group: Group,
        nbytes: int,
        notifications: int,
        owner: object | None = None,
        address: int = 0,
        timeout: float | None = None,
        *,
        table: SegmentTable,
        device: int | None = None,
    ) -> None:
        number = _HOST if device is None else device
        try:
            super().__init__(group.core, nbytes, notifications, address, timeout, number)
        finally:
            group.hold_half_bound(owner, address)
        self.group = group
        self.attached: dict[Hashable, object] = {}
        self.pooled = self.workspace = False
        self._owner = owner
        self._table = table

    @property
    def device(self) -> str:
        """Where this rank's copy lies: "cpu", or such as "cuda:0"."""
        return name_of(self._ordinal)

    @property
    def bound(self) -> bool:
        """Whether it is memory that was allocated elsewhere (:meth:`Context.bind`)."""
        return self._owner is not None

    @property
    def _ordinal(self) -> int | None:
        return None if self.device_number == _HOST else self.device_number

    def numpy(
        self,
        dtype: npt.DTypeLike = np.uint8,
        offset: int = 0,
        shape: int | tuple[int, ...] | None = None,
        *,
        peer: int | None = None,
    ) -> npt.NDArray[Any]:
        """Return a NumPy view of this rank's copy, or of a peer's that is mapped here.

        Parameters
        ----------
        dtype : dtype, default np.uint8
            Dtype of the elements; also "bfloat16", or a PyTorch dtype.
        offset : int, default 0
            Bytes from the beginning of the segment.
        shape : int or tuple[int, ...], optional
            Shape of the view; None: one dimension, to the end.
        peer : int, optional
            The rank whose copy is viewed; None: this rank. Only notifications say when a peer's
            bytes may be read or changed.

        Raises
        ------
        SegmentError
            The view goes beyond the segment, or the segment was deleted.
        UnavailableError
            The peer's copy is not mapped here: use ``ctx.read`` and ``ctx.write``. Or the segment
            is on a GPU.
        RankError, PeerLostError
        """
        if self._ordinal is not None:
            raise UnavailableError(
                f"segment {self.id} is on {self.device}, which NumPy cannot reach: view it by "
                "cupy() or torch(), or copy by copy_to() and copy_from()"
            )
        element = as_numpy_dtype(dtype)
        shape, needed = self._extent(element, element.itemsize, offset, shape, peer)
        if needed == 0:
            return np.empty(shape, element)
        if peer is None:
            raw = np.asarray(memoryview(self))[offset : offset + needed]
        else:
            there = self.address_of(peer) + offset
            raw = Memory(there, needed, element, shape, self).on_host()
        view: npt.NDArray[Any] = raw.view(element).reshape(shape)
        return view

    def _extent(
        self,
        element: object,
        itemsize: int,
        offset: int,
        shape: int | tuple[int, ...] | None,
        peer: int | None,
    ) -> tuple[tuple[int, ...], int]:
        """Return the shape of a view, and its bytes; refuse a view that is impossible."""
        if self.deleted:
            raise SegmentError(f"segment {self.id} was deleted on this rank")
        nbytes = self.nbytes if peer is None else self.nbytes_of(peer)
        if shape is None:
            shape = (max(0, nbytes - offset) // itemsize,)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        needed = math.prod(shape) * itemsize
        if offset < 0 or min(shape, default=0) < 0 or offset + needed > nbytes:
            whose = "" if peer is None else f" on rank {peer}"
            raise SegmentError(
                f"a view of {shape} {element} at byte {offset} leaves segment {self.id} of "
                f"{nbytes} bytes{whose}"
            )
        if peer is not None and nbytes and not self.address_of(peer):
            raise UnavailableError(
                f"the memory of rank {peer} is not mapped here (segment {self.id}): read it with "
                "ctx.read, write it with ctx.write"
            )
        return shape, needed

    def torch(
        self,
        dtype: Any = None,
        offset: int = 0,
        shape: int | tuple[int, ...] | None = None,
        *,
        peer: int | None = None,
    ) -> Any:
        """Return a PyTorch tensor over a rank's copy; parameters as for :meth:`numpy`.

        ``dtype`` is a torch dtype, None: ``torch.uint8``.
        """
        import torch

        element = torch.uint8 if dtype is None else dtype
        itemsize = torch.empty(0, dtype=element).element_size()
        if self._ordinal is not None:
            raw, shape = self._on_device(element, itemsize, offset, shape, peer)
            return torch_view(raw, element, shape)
        shape, needed = self._extent(element, itemsize, offset, shape, peer)
        if needed == 0:  # torch views no empty bytes as anything else
            return torch.empty(shape, dtype=element)
        view = self.numpy(np.uint8, offset, needed, peer=peer)
        return torch.from_numpy(view).view(element).reshape(shape)

    def cupy(
        self,
        dtype: npt.DTypeLike = np.uint8,
        offset: int = 0,
        shape: int | tuple[int, ...] | None = None,
        *,
        peer: int | None = None,
    ) -> Any:
        """Return a CuPy array over a rank's copy on a GPU; parameters as for :meth:`numpy`.

        Raises
        ------
        AlignmentError
            ``offset`` is no multiple of the size of an element.
        SegmentError
            The view goes beyond the segment, or the segment was deleted.
        UnavailableError
            The segment is on the host, or the peer's copy is not mapped here.
        RankError, PeerLostError
        """
        element = as_numpy_dtype(dtype)
        raw, shape = self._on_device(element, element.itemsize, offset, shape, peer)
        return cupy_view(raw, element, shape)

    def _on_device(
        self,
        element: object = np.uint8,
        itemsize: int = 1,
        offset: int = 0,
        shape: int | tuple[int, ...] | None = None,
        peer: int | None = None,
    ) -> tuple[DeviceBytes, tuple[int, ...]]:
        """Return the bytes of a view on a GPU, and its shape."""
        if self._ordinal is None:
            raise UnavailableError(f"segment {self.id} is on the host: view it by numpy()")
        shape, needed = self._extent(element, itemsize, offset, shape, peer)
        if offset % itemsize:  # a kernel that loads from there would end the process's context
            raise AlignmentError(f"byte {offset} is no multiple of {itemsize}, as {element} needs")
        begin = self.address if peer is None else self.address_of(peer)
        return DeviceBytes(self, begin + offset, needed, self._ordinal), shape

    def copy_from(self, array: object, offset: int = 0) -> None:
        """Copy an array of the host into this rank's copy, wherever that lies.

        On a GPU the current stream of PyTorch or CuPy orders it; it is done on return.

        Parameters
        ----------
        array : array_like
            Contiguous: array, tensor, anything with the buffer protocol.
        offset : int, default 0
            Bytes from the beginning of the segment.

        Raises
        ------
        BufferRefusedError
            Strided, or on a device.
        SegmentError
            It does not fit, or the segment was deleted.
        """
        memory = memory_of(array, writable=False)
        if self._ordinal is None:
            self.numpy(np.uint8, offset, memory.nbytes)[:] = memory.on_host()
        else:
            to = self._place(memory, offset)
            _native.device_copy(to, memory.address, memory.nbytes, *self._on_stream())

    def copy_to(self, array: object, offset: int = 0) -> None:
        """Copy from this rank's copy, wherever that lies, into an array of the host.

        On a GPU the current stream of PyTorch or CuPy orders it; it is done on return.

        Parameters
        ----------
        array : array_like
            Contiguous and writable. All of it is filled.
        offset : int, default 0
            Bytes from the beginning of the segment.

        Raises
        ------
        BufferRefusedError
            Strided, read-only, or on a device.
        SegmentError
            The segment does not have as much, or was deleted.
        """
        memory = memory_of(array)
        if self._ordinal is None:
            memory.on_host()[:] = self.numpy(np.uint8, offset, memory.nbytes)
        else:
            source = self._place(memory, offset)
            _native.device_copy(memory.address, source, memory.nbytes, *self._on_stream())

    def _on_stream(self) -> tuple[int, int]:
        """Return the GPU, and the current stream there, which orders copies."""
        assert self._ordinal is not None
        stream = stream_handle(None, self._ordinal)
        _native.refuse_capture(self._ordinal, stream, "a copy between host and GPU")
        return self._ordinal, stream

    def _place(self, memory: Memory, offset: int) -> int:
        """Return the address from ``offset`` on, where as many bytes are as ``memory`` has."""
        self._extent(memory.dtype, 1, offset, memory.nbytes, None)
        return self.address + offset

    def delete(self) -> None:
        """Give up this rank's copy. Peers' copies stay reachable; views keep their memory.

        Raises
        ------
        SegmentError
            It is already deleted.

        Notes
        -----
        :meth:`close` does the same, and may be called twice.
        """
        super().delete()
        self._table.remove(self)

    def close(self) -> None:
        """Give up this rank's copy, unless it is deleted or the context closed. Idempotent."""
        if self.group.context.closed:
            return
        with suppress(SegmentError):
            self.delete()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self._ordinal is None:
            raise AttributeError("a segment on the host has no __cuda_array_interface__")
        return self._on_device()[0].__cuda_array_interface__

    def __dlpack__(self, **options: Any) -> Any:
        if self._ordinal is None:
            return self.numpy().__dlpack__(**options)
        return self._on_device()[0].__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        if self._ordinal is None:
            return (1, 0)  # host memory
        return self._on_device()[0].__dlpack_device__()

    def __repr__(self) -> str:
        if not hasattr(self, "group"):  # debuggers may ask before __init__ ends
            return "<Segment, not created>"
        where = "" if self._ordinal is None else f" on {self.device}"
        state = ", deleted" if self.deleted else ""
        return f"<Segment {self.id}, {self.nbytes} bytes{where}{state}>"


class SegmentTable:
    """The segments of one context, and their places.

    ``kept`` has, by id, those that peers reach by address: they live until they are deleted.
    """

    def __init__(self, core: _native.ContextCore) -> None:
        self._core = core
        self._watchers: list[Callable[[], None]] = []
        self._places: dict[int, tuple[int, int, weakref.ref[Segment]]] = {}
        self._warned = False
        self._limit = memory_limit()
        self.kept: dict[int, Segment] = {}

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` whenever a segment is made or deleted."""
        self._watchers.append(changed)

    def make(
        self,
        group: Group,
        nbytes: int,
        notifications: int,
        timeout: float | None,
        device: int | None = None,
        *,
        workspace: bool = False,
    ) -> Segment:
        """Make a new segment of a group. Collective; see :meth:`Context.segment`."""
        segment = Segment(group, nbytes, notifications, timeout=timeout, table=self, device=device)
        if device is None and nbytes > self._limit:
            log.warning(
                "rank %d: segment %d has %.1f GiB, this machine or cgroup %.1f: pages are taken as "
                "they are touched, and the kernel kills who touches more than there are",
                self._core.rank,
                segment.id,
                nbytes / _GIB,
                self._limit / _GIB,
            )
        segment.workspace = workspace
        self._add(segment)
        if not group.mapped:
            self.kept[segment.id] = segment
        return segment

    def bind(
        self, group: Group, memory: Memory, notifications: int, timeout: float | None
    ) -> Segment:
        """Make a segment over existing memory. Collective; see :meth:`Context.bind`."""
        device = memory.device
        if memory.nbytes == 0:
            return Segment(group, 0, notifications, timeout=timeout, table=self, device=device)
        if device is None:
            self._warn_of_open_memory()
        segment = Segment(
            group,
            memory.nbytes,
            notifications,
            memory.owner,
            memory.address,
            timeout,
            table=self,
            device=device,
        )
        # The segment must stay when the program drops it: peers may still write to the memory.
        self.kept[segment.id] = segment
        if device is not None:  # mapped by peers, as memory of the host is not
            self._add(segment)
        return segment

    def _warn_of_open_memory(self) -> None:
        """Warn once if every process of this user may reach bound memory (Yama)."""
        core = self._core
        peers = [core._pid_of(peer) for peer in range(core.size) if peer != core.rank]
        near = [pid for pid in peers if pid not in (0, os.getpid())]
        if self._warned or not near or ptrace_scope() != "1":
            return
        self._warned = True
        if _native.common_ancestor(near) <= 1:
            log.warning(
                "rank %d: Yama restricts access to bound memory, and the ranks of this machine "
                "have no common launcher to admit: every process of this user may reach it from "
                "now on. Start the ranks by one launcher, or use ctx.segment",
                core.rank,
            )

    def _add(self, segment: Segment) -> None:
        """Let :meth:`at` find arrays in ``segment`` from now on, until it is deleted."""
        key = id(segment)
        where = segment.address, segment.address + segment.nbytes
        self._places[key] = (*where, weakref.ref(segment, lambda _: self._forget(key)))
        self._tell()

    def remove(self, segment: Segment) -> None:
        """Drop a deleted segment."""
        self.kept.pop(segment.id, None)
        self._tell()

    def at(self, memory: Memory) -> tuple[Segment | None, int]:
        """Return the segment that holds some memory, and the offset in it; (None, 0) if none."""
        first, last = memory.address, memory.address + memory.nbytes
        for begin, end, reference in list(self._places.values()):
            if begin <= first and last <= end:
                segment = reference()
                if segment is not None and not segment.deleted:
                    return segment, first - begin
        return None, 0

    def pooled(self, group: Group) -> list[Segment]:
        """Return the segments of the pool that a group's members have, in the order of making."""
        pooled = [each for each in self._alive() if each.pooled and group.within(each.group)]
        return sorted(pooled, key=lambda segment: segment.id)

    def of(self, number: int) -> Segment | None:
        """Return the segment with this id, unless it was deleted or dropped here."""
        for segment in self._alive():
            if segment.id == number and not segment.deleted:
                return segment
        return None

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the library's own segments, with their notifications."""
        return sum(
            segment.nbytes + _NOTIFICATION_BYTES * segment.notifications
            for segment in self._alive()
            if segment.workspace and not segment.deleted
        )

    def _alive(self) -> Iterator[Segment]:
        """Yield the segments that somebody holds, also deleted ones."""
        for _, _, reference in list(self._places.values()):
            if (segment := reference()) is not None:
                yield segment

    def _tell(self) -> None:
        for changed in self._watchers:
            changed()

    def _forget(self, key: int) -> None:
        self._places.pop(key, None)
        self._tell()
