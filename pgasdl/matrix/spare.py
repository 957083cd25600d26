"""Memory of arrays that are gone, for new ones: its pages are there, and need not be cleared."""

from __future__ import annotations

from collections import deque
from sys import getrefcount
from typing import Any

import numpy as np

from pgasdl.buffers import ALIGNMENT
from pgasdl.matrix.elements import Array

# Bytes that are worth keeping, and the most; of all that is kept together; and how many blocks.
_LEAST, _MOST, _TOGETHER, _BLOCKS = 32 << 10, 64 << 20, 128 << 20, 8


class _Memory(np.ndarray[Any, Any]):
    """Memory of this module."""


class Spare:
    """The last blocks that were given back: by any thread, if the garbage collector does it."""

    def __init__(self) -> None:
        self._blocks: deque[Array] = deque(maxlen=_BLOCKS)

    def empty(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return memory, whose owner gives it back."""
        nbytes = count * dtype.itemsize
        if not _LEAST <= nbytes <= _MOST:
            return np.empty(count, dtype)
        for _ in range(len(self._blocks)):
            block = self._blocks.pop()
            if block.size == count and block.dtype == dtype:
                return block
            self._blocks.appendleft(block)
        memory = np.ndarray.__new__(_Memory, nbytes + ALIGNMENT, np.uint8)
        return np.ndarray(count, dtype, memory, -memory.ctypes.data % ALIGNMENT)

    def take(self, owner: Any) -> None:
        """Keep the memory of an array that is going away, unless somebody else uses it."""
        if _references(owner) == _ALONE and type(owner._flat.base) is _Memory:
            self._blocks.append(owner._flat)
            if owner._flat.nbytes * _BLOCKS > _TOGETHER:
                while sum(each.nbytes for each in tuple(self._blocks)) > _TOGETHER:
                    self._blocks.popleft()


class _Owner:
    def __init__(self) -> None:
        self._flat = np.empty(0)


def _references(owner: Any) -> int:
    return getrefcount(owner._flat)


_ALONE = _references(_Owner())
