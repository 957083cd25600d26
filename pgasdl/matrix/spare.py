"""Memory of arrays that are gone, for new ones: its pages are there, and need not be cleared."""

from __future__ import annotations

from collections import deque

import numpy as np

from pgasdl.matrix.elements import Array

# Bytes that are worth keeping, and the most; so many blocks are kept, as a * b + c uses two.
_LEAST, _MOST, _BLOCKS = 1 << 20, 64 << 20, 2


class Spare:
    """The last blocks that were given back: by any thread, if the garbage collector does it."""

    def __init__(self) -> None:
        self._blocks: deque[Array] = deque(maxlen=_BLOCKS)

    def empty(self, nbytes: int) -> Array:
        """Return bytes, which are given back when the array and its views are gone."""
        if not _LEAST <= nbytes <= _MOST:
            return np.empty(nbytes, np.uint8)
        for _ in range(len(self._blocks)):
            block = self._blocks.popleft()
            if block.nbytes == nbytes:
                break
            self._blocks.append(block)
        else:
            block = np.empty(nbytes, np.uint8)
        return np.asarray(_Lent(block, self._blocks))


class _Lent:
    """A block in a form that NumPy takes: it lives as long as an array uses it."""

    def __init__(self, block: Array, blocks: deque[Array]) -> None:
        self._block, self._blocks = block, blocks
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        self._blocks.append(self._block)
