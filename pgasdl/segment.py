"""Segments: memory of this rank that every rank of a group can write to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pgasdl import _native
from pgasdl.buffers import as_numpy_dtype
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
        self.group.context.kept.pop(self.id, None)
        self.group.context.segments_changed()

    def __dlpack__(self, **options: Any) -> Any:
        return self.numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # host memory

    def __repr__(self) -> str:
        state = ", deleted" if self.deleted else ""
        return f"<Segment {self.id}, {self.nbytes} bytes{state}>"
