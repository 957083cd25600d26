"""Segments: memory that all ranks of a group can write to."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pgasdl import _native
from pgasdl.buffers import Memory, as_numpy_dtype
from pgasdl.errors import SegmentError
from pgasdl.group import Group
from pgasdl.kernel import ptrace_scope

log = logging.getLogger("pgasdl")


class Segment(_native.SegmentCore):
    """Memory that all members of a group can write to, read from and raise notifications on.

    Made by :meth:`Context.segment` and :meth:`Context.bind`, collectively. ``segment[a:b]`` names
    bytes a to b: of this rank's copy as a source, of a peer's as a target. Sizes may differ
    between ranks. Views (:meth:`numpy`, :meth:`torch`, DLPack, the buffer protocol) share the
    memory and keep it alive. :meth:`close`, or a ``with`` statement, gives the copy up.
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
    ) -> None:
        try:
            super().__init__(group.core, nbytes, notifications, address, timeout)
        except BaseException:
            if address:
                group.hold_half_bound(owner, address)
            raise
        self.group = group
        self._owner = owner
        self._table = table

    def numpy(
        self,
        dtype: npt.DTypeLike = np.uint8,
        offset: int = 0,
        shape: int | tuple[int, ...] | None = None,
    ) -> npt.NDArray[Any]:
        """Return a NumPy view of this rank's copy.

        Parameters
        ----------
        dtype : dtype, default np.uint8
            Dtype of the elements; also "bfloat16", or a PyTorch dtype.
        offset : int, default 0
            Bytes from the beginning of the segment.
        shape : int or tuple[int, ...], optional
            Shape of the view; None: one dimension, to the end.

        Raises
        ------
        SegmentError
            The view goes beyond the segment, or the segment was deleted.
        """
        element = as_numpy_dtype(dtype)
        if self.deleted:
            raise SegmentError(f"segment {self.id} was deleted on this rank")
        if shape is None:
            shape = (max(0, self.nbytes - offset) // element.itemsize,)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        needed = math.prod(shape) * element.itemsize
        if offset < 0 or min(shape, default=0) < 0 or offset + needed > self.nbytes:
            raise SegmentError(
                f"a view of {shape} {element} at byte {offset} leaves segment {self.id} of "
                f"{self.nbytes} bytes"
            )
        if needed == 0:
            return np.empty(shape, element)
        raw = np.frombuffer(memoryview(self), np.uint8, needed, offset)
        view: npt.NDArray[Any] = raw.view(element).reshape(shape)
        return view

    def torch(
        self, dtype: Any = None, offset: int = 0, shape: int | tuple[int, ...] | None = None
    ) -> Any:
        """Return a PyTorch tensor over this rank's copy; parameters as for :meth:`numpy`.

        ``dtype`` is a torch dtype, None: ``torch.uint8``.
        """
        import torch

        element = torch.uint8 if dtype is None else dtype
        itemsize = torch.empty(0, dtype=element).element_size()
        if shape is None:
            shape = (max(0, self.nbytes - offset) // itemsize,)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        view = self.numpy(np.uint8, offset, math.prod(shape) * itemsize)
        return torch.from_numpy(view).view(element).reshape(shape)

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

    def __dlpack__(self, **options: Any) -> Any:
        return self.numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # host memory

    def __repr__(self) -> str:
        if not hasattr(self, "group"):  # debuggers may ask before __init__ ends
            return "<Segment, not created>"
        state = ", deleted" if self.deleted else ""
        return f"<Segment {self.id}, {self.nbytes} bytes{state}>"


class SegmentTable:
    """The segments of one context: where they lie, and which must outlive their names.

    Attributes
    ----------
    kept : dict[int, Segment]
        Segments that peers reach by address, by id: they live until they are deleted.
    """

    def __init__(self, core: _native.ContextCore) -> None:
        self._core = core
        self._watchers: list[Callable[[], None]] = []
        self._places: dict[int, tuple[int, int, weakref.ref[Segment]]] = {}
        self._warned = False
        self.kept: dict[int, Segment] = {}

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` whenever a segment is made or deleted."""
        self._watchers.append(changed)

    def make(self, group: Group, nbytes: int, notifications: int, timeout: float | None) -> Segment:
        """Make a new segment of a group. Collective; see :meth:`Context.segment`."""
        segment = Segment(group, nbytes, notifications, timeout=timeout, table=self)
        self._add(segment)
        if not group.mapped:
            self.kept[segment.id] = segment
        return segment

    def bind(
        self, group: Group, memory: Memory, notifications: int, timeout: float | None
    ) -> Segment:
        """Make a segment over existing memory. Collective; see :meth:`Context.bind`."""
        if memory.nbytes == 0:
            return Segment(group, 0, notifications, timeout=timeout, table=self)
        self._warn_of_open_memory()
        owner, address = memory.owner, memory.address
        segment = Segment(group, memory.nbytes, notifications, owner, address, timeout, table=self)
        # It must stay when its name goes out of scope.
        self.kept[segment.id] = segment
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
        """Find arrays in ``segment`` from now on, until it is deleted."""
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

    def _tell(self) -> None:
        for changed in self._watchers:
            changed()

    def _forget(self, key: int) -> None:
        self._places.pop(key, None)
        self._tell()
