"""What distributed matrices and vectors have in common: blocks on ranks, in some layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from pgasdl.buffers import as_numpy_dtype
from pgasdl.errors import LayoutError
from pgasdl.matrix.elements import Array, core_dtype
from pgasdl.matrix.layout import Block, Layout
from pgasdl.matrix.serving import Numbered, served
from pgasdl.matrix.space import Space


class DistributedArray(Numbered):
    """A matrix or vector in blocks on ranks. All ranks of its group run the same statements.

    Attributes
    ----------
    space : Space
        The ranks, and how blocks move between them.
    layout : Layout
        Which rank has which block; a vector is a column.
    flat : ndarray
        This rank's blocks, one after another, of one dimension.
    version : int
        How often it was changed, the same on all ranks.
    """

    ndim: int
    # The class by its number of dimensions.
    _kinds: ClassVar[dict[int, type[DistributedArray]]] = {}

    def __init_subclass__(cls, ndim: int | None = None) -> None:
        if ndim is not None:
            cls.ndim = ndim
            DistributedArray._kinds[ndim] = cls

    def __init__(
        self, space: Space, layout: Layout, dtype: npt.DTypeLike, flat: Array | None = None
    ) -> None:
        element = as_numpy_dtype(dtype)
        core_dtype(element)
        self.space: Space = space
        self.layout, self.version = layout, 0
        self.flat = space.empty(layout.count(space.rank), element) if flat is None else flat
        # Copies in other layouts that were made before, and the version that each has.
        self._seen: dict[tuple[Layout, np.dtype[Any]], tuple[int, Self]] = {}
        self._is_replica = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns; elements of a vector."""
        return self.layout.shape[: self.ndim]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the elements."""
        return self.flat.dtype

    @property
    def size(self) -> int:
        """Number of elements on all ranks."""
        return self.layout.shape[0] * self.layout.shape[1]

    def __len__(self) -> int:
        return self.shape[0]

    def blocks(self) -> Iterator[tuple[Block, Array]]:
        """Yield this rank's blocks, and views of their elements, of two dimensions.

        All ranks call :meth:`changed` after some wrote to theirs.
        """
        for block, at in self.layout.placed(self.space.rank):
            shape = block.rows, block.columns
            yield block, self.flat[at : at + block.count].reshape(shape)

    def kept(self) -> Iterator[tuple[Block, Array]]:
        """Yield the blocks that count here, where each element counts on one rank."""
        for block, mine in self.blocks():
            if self.layout.keeper(block) == self.space.rank:
                yield block, mine

    @served
    def changed(self) -> None:
        """Tell that its elements are others now: replicas are renewed when they are used next.

        All ranks call it.

        Raises
        ------
        LayoutError
            It is a replica.
        """
        self.require_original()
        self.version += 1

    def require_original(self) -> None:
        """Raise LayoutError for a replica, which only its original changes, and in explain()."""
        if self.space.told is not None:
            raise LayoutError("what is explained cannot be in place: it is not done")
        if self._is_replica:
            raise LayoutError("a replica is not changed, but its original: or take a copy()")

    # --- other layouts

    @served
    def remap(self, layout: Layout | str, dtype: npt.DTypeLike | None = None) -> Self:
        """Return it in another layout. Collective.

        Parameters
        ----------
        layout : Layout or str
            Over any ranks of the group; or "rows", "columns", "grid", "cyclic", "replicated".
        dtype : dtype, optional
            Of the elements; None: as they are. The narrower one of both travels.

        Raises
        ------
        LayoutError
            Of another shape, or of ranks that are not there.
        BufferRefused
            A dtype that matrices do not have.
        PlanError
            A conversion from or to integers.
        MismatchError
            Ranks remap different matrices, or to different layouts.
        PeerLost, Timeout
            Nothing can be moved in this group any more.

        Notes
        -----
        dMath: remap, with a change of precision on the way.
        """
        wanted = self.space.layout(self.layout.shape, layout)
        found = type(self)(self.space, wanted, self.dtype if dtype is None else dtype)
        self._fill(found)
        return found

    @served
    def replica(self, layout: Layout | str, dtype: npt.DTypeLike | None = None) -> Self:
        """Return a copy in another layout that is kept, and moved again only after a change.

        Collective. It cannot be changed itself. Parameters and errors as for :meth:`remap`.

        Notes
        -----
        dMath: replication, and caching of blocks that came by.
        """
        wanted = self.space.layout(self.layout.shape, layout)
        element = self.dtype if dtype is None else as_numpy_dtype(dtype)
        if wanted == self.layout and element == self.dtype:
            return self
        version, replica = self._seen.get((wanted, element), (-1, None))
        if replica is None:
            replica = type(self)(self.space, wanted, element)
            replica._is_replica = True
        if version != self.version:
            self._fill(replica)
            replica.version += 1
            if self.space.told is None:
                self._seen[wanted, element] = self.version, replica
        return replica

    def nearest(self) -> Self:
        """Return the replica of it on all ranks, if that is up to date, or itself."""
        everywhere = self.space.layout(self.layout.shape, "replicated")
        version, replica = self._seen.get((everywhere, self.dtype), (-1, None))
        return self if replica is None or version != self.version else replica

    @served
    def forget(self) -> None:
        """Give up the memory of all replicas."""
        self._seen.clear()

    @served
    def everywhere(self) -> Array:
        """Return the whole of it as every rank has it in a replica, read-only. Collective.

        The same as ``numpy.asarray``, without a copy.
        """
        whole = self.replica("replicated").flat.reshape(self.shape)
        whole.flags.writeable = False
        return whole

    @served
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("a distributed array has to be copied")
        return self.everywhere().astype(self.dtype if dtype is None else dtype)

    @served
    def astype(self, dtype: npt.DTypeLike) -> Self:
        """Return it with elements of another dtype."""
        element = as_numpy_dtype(dtype)
        core_dtype(element)
        found = type(self)(self.space, self.layout, element)
        found.flat[:] = self.flat
        return found

    @served
    def copy(self) -> Self:
        """Return a copy."""
        return self.astype(self.dtype)

    def _fill(self, other: DistributedArray) -> None:
        self.space.move(self.layout, self.flat, other.layout, other.flat)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.dtype}, {self.layout}>"


def make(
    ndim: int, space: Space, layout: Layout, dtype: npt.DTypeLike, flat: Array | None = None
) -> Any:
    """Return a matrix or vector, by its number of dimensions."""
    return DistributedArray._kinds[ndim](space, layout, dtype, flat)


def require_same_space(*arrays: DistributedArray) -> None:
    """Raise LayoutError unless all are of one group."""
    for array in arrays:
        if array.space is not arrays[0].space:
            raise LayoutError(f"{arrays[0]} and {array} are of different groups")
