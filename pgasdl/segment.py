"""Segments: memory of this rank that every rank of a group can write to."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pgasdl import _native
from pgasdl.buffers import Memory, as_numpy_dtype
from pgasdl.errors import SegmentError

if TYPE_CHECKING:
    from pgasdl.group import Group


class Segment(_native.SegmentCore):
    """Memory that all members of a group can write to, read from and raise notifications on.

    Made by :meth:`Context.segment` and :meth:`Context.bind`, collectively. ``segment[a:b]`` names
    bytes a to b: of this rank's copy as a source, of a peer's as a target. Sizes may differ from
    rank to rank. Views (:meth:`numpy`, :meth:`torch`, DLPack, the buffer protocol) share the memory
    and keep it alive.
    """

    def __init__(
        self,
        group: Group,
        nbytes: int,
        notifications: int,
        owner: object | None = None,
        address: int = 0,
        timeout: float | None = None,
    ) -> None:
        super().__init__(group.core, nbytes, notifications, address, timeout)
        self.group = group
        self._owner = owner

    def numpy(
        self,
        dtype: npt.DTypeLike = np.uint8,
        offset: int = 0,
        shape: int | tuple[int, ...] | None = None,
    ) -> npt.NDArray[Any]:
        """A NumPy view of this rank's copy.

        Parameters
        ----------
        dtype : of the elements; also "bfloat16", or a PyTorch dtype
        offset : bytes from the beginning
        shape : of the view; None: one dimension, to the end

        Raises
        ------
        SegmentError   the view leaves the segment, or the segment was deleted
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
        """A PyTorch tensor over this rank's copy; parameters as for :meth:`numpy`.

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
        """Give this rank's copy up. Peers' copies stay reachable; views keep their memory.

        Raises
        ------
        SegmentError   it was deleted already
        """
        super().delete()
        self.group.context.segments.remove(self)

    def __dlpack__(self, **options: Any) -> Any:
        return self.numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # host memory

    def __repr__(self) -> str:
        if not hasattr(self, "group"):  # debuggers and error reporters ask while it is made
            return "<Segment, not created>"
        state = ", deleted" if self.deleted else ""
        return f"<Segment {self.id}, {self.nbytes} bytes{state}>"


class SegmentTable:
    """The segments of one context: where they lie, and those that must outlive their names.

    Attributes
    ----------
    kept : by id, segments that peers reach by address: they live until they are deleted
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed  # where arrays lie has to be looked up again
        self._places: dict[int, tuple[int, int, weakref.ref[Segment]]] = {}
        self.kept: dict[int, Segment] = {}

    def add(self, segment: Segment) -> None:
        """Find arrays in ``segment`` from now on, as long as it is there."""
        key = id(segment)
        where = segment.address, segment.address + segment.nbytes
        self._places[key] = (*where, weakref.ref(segment, lambda _: self._forget(key)))
        self._changed()

    def keep(self, segment: Segment) -> None:
        """It must not go because a name went out of scope here."""
        self.kept[segment.id] = segment

    def remove(self, segment: Segment) -> None:
        """It was deleted."""
        self.kept.pop(segment.id, None)
        self._changed()

    def at(self, memory: Memory) -> tuple[Segment | None, int]:
        """The segment that holds some memory, and where in it; (None, 0) if none does."""
        first, last = memory.address, memory.address + memory.nbytes
        for begin, end, reference in list(self._places.values()):
            if begin <= first and last <= end:
                segment = reference()
                if segment is not None and not segment.deleted:
                    return segment, first - begin
        return None, 0

    def _forget(self, key: int) -> None:
        self._places.pop(key, None)
        self._changed()
