"""What distributed matrices and vectors have in common: blocks on ranks, in some layout."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from pgasdl.buffers import as_numpy_dtype
from pgasdl.errors import LayoutError
from pgasdl.matrix.elements import Array, core_dtype
from pgasdl.matrix.layout import Block, Layout
from pgasdl.matrix.remapping import RemapHandle, begin_remap
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
    """

    ndim: int
    # The class by its number of dimensions.
    _kinds: ClassVar[dict[int, type[DistributedArray]]] = {}

    def __init_subclass__(cls, ndim: int | None = None) -> None:
        if ndim is not None:
            cls.ndim = ndim
            DistributedArray._kinds[ndim] = cls

    def __init__(
        self,
        space: Space,
        layout: Layout,
        dtype: npt.DTypeLike,
        flat: Array | None = None,
        *,
        original: DistributedArray | None = None,
        numbered: bool = True,
    ) -> None:
        element = as_numpy_dtype(dtype)
        core_dtype(element)
        self.space: Space = space
        self.layout = layout
        self._flat = space.empty(layout.count(space.rank), element) if flat is None else flat
        # Replicas in other layouts. Each shares its original's number and count of changes, and
        # has been filled when there were so many.
        self._seen: dict[tuple[Layout, np.dtype[Any]], Self] = {}
        self._original = None if original is None else weakref.ref(original)
        self._filled = -1
        self._number = 0
        self._changes: list[int] = [0] if original is None else original._changes
        if original is not None:
            self._number = original._number
        elif numbered:
            self.take_number()

    def __del__(self) -> None:
        if hasattr(self, "_flat"):  # an error came first
            self.space.spare.take(self)
            if self.space.kept.limit and self._original is None:
                self.space.kept.drop(self)

    def take_number(self) -> None:
        """Take the next number, the same on all ranks if they are in step.

        Once it is made: a call that is repeated after a timeout takes one. What is explained has
        none, as one rank may ask alone.
        """
        if self.space.told is not None:
            return
        self.space.n_arrays += 1
        self._number = self.space.n_arrays

    def lies_as(self, other: DistributedArray) -> bool:
        """Whether each element lies where another one's lies."""
        mine, its = self.layout, other.layout
        alike = type(self) is type(other) and self.space is other.space
        return alike and (mine is its or mine == its)

    def like(self, dtype: np.dtype[Any]) -> Self:
        """Return a new one in its layout, whose elements are not set."""
        flat = self.space.empty(self._flat.size, dtype)
        return type(self)(self.space, self.layout, dtype, flat)

    @property
    def flat(self) -> Array:
        """Blocks of this rank, one after another, of one dimension."""
        if self._original is not None:
            self._renew()
        return self._flat

    @flat.setter
    def flat(self, flat: Array) -> None:
        self._flat = flat

    @property
    def number(self) -> int:
        """Its number in the space, that of its original; 0: it has none."""
        return self._number

    @property
    def version(self) -> int:
        """How often it was changed."""
        return self._changes[0]

    @property
    def identity(self) -> str:
        """Text that differs between ranks that are out of step, or whose arrays differ."""
        told = f"array {self.number} version {self.version}"
        return f"{told}, {core_dtype(self.dtype)}, {self.layout.identity}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns; elements of a vector."""
        return self.layout.shape[: self.ndim]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the elements."""
        return self._flat.dtype

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
        flat = self.flat  # also where there is no block: to renew a replica is collective
        for block, at in self.layout.placed(self.space.rank):
            yield block, flat[at : at + block.count].reshape(block.rows, block.columns)

    def counted(self) -> list[Array]:
        """Return what counts of this rank's elements, in arrays of one dimension."""
        flat = self.flat
        if self.layout.keeps(self.space.rank):
            return [flat]
        return [mine.reshape(-1) for _, mine in self.kept()]

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
        self._changes[0] += 1
        self.space.kept.drop(self)

    def require_original(self) -> None:
        """Raise LayoutError for a replica, which only its original changes, and in explain()."""
        if self._number and self.space.told is not None:  # it was there before
            raise LayoutError("what is explained cannot be in place: it is not done")
        if self._original is not None:
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
        BufferRefusedError
            A dtype that matrices do not have.
        PlanError
            A conversion from or to integers.
        MismatchError
            Ranks remap different matrices, or to different layouts: one made another matrix, or
            changed one, where the others did not.
        PeerLostError, PgasTimeoutError
            Nothing can be moved in this group any more.

        Notes
        -----
        dMath: remap, with a change of precision on the way.
        """
        wanted = self.space.layout(self.layout.shape, layout)
        element = self.dtype if dtype is None else dtype
        found = type(self)(self.space, wanted, element, numbered=False)
        self.space.move(self, wanted, found._flat)
        found.take_number()
        return found

    @served
    def remap_async(self, layout: Layout | str, dtype: npt.DTypeLike | None = None) -> RemapHandle:
        """Begin to remap it; ``wait()`` of the handle returns it in the other layout. Collective.

        Meanwhile ranks compute; nobody changes it. Blocks in the pool move meanwhile: a thread
        copies them where memory is mapped, else they are read. Blocks outside the pool, or of
        another dtype that are to be read, move in ``wait()``. One that nobody waits for keeps its
        memory until the next one begins. Parameters and errors as for :meth:`remap`.

        Notes
        -----
        dMath: asynchronous remap.
        """
        wanted = self.space.layout(self.layout.shape, layout)
        return begin_remap(self, wanted, self.dtype if dtype is None else as_numpy_dtype(dtype))

    @served
    def replica(self, layout: Layout | str, dtype: npt.DTypeLike | None = None) -> Self:
        """Return a copy in another layout that is kept, and moved again only after a change.

        Collective, and so is its next use after a change of the original. It cannot be changed
        itself. Parameters and errors as for :meth:`remap`.

        Notes
        -----
        dMath: replication, and caching of blocks that came by.
        """
        wanted = self.space.layout(self.layout.shape, layout)
        element = self.dtype if dtype is None else as_numpy_dtype(dtype)
        if wanted == self.layout and element == self.dtype:
            return self
        replica = self._seen.get((wanted, element))
        if replica is None:
            replica = type(self)(self.space, wanted, element, original=self)
            if self.space.told is None:
                self._seen[wanted, element] = replica
        replica._renew()
        return replica

    def _renew(self) -> None:
        """Fill a replica whose original was changed. Collective then."""
        if self._original is None or self._filled == self._changes[0]:
            return
        original = self._original()
        if original is None:
            raise LayoutError("a replica is out of date, and its original is gone: take a copy()")
        told = self.space.told
        if told is not None and any(each is self for each in told.filled):
            return
        original.space.move(original, self.layout, self._flat)
        if told is None:
            self._filled = self._changes[0]
        else:
            told.filled.append(self)

    def expire(self) -> None:
        """Let the next use of this replica, or of this original's replicas, fill them again."""
        self._filled = -1
        for each in self._seen.values():
            each.expire()
        if self._original is None:
            self.space.kept.drop(self)

    @served
    def forget(self) -> None:
        """Give up the memory of all replicas, and of what products keep."""
        self._seen.clear()
        self.space.kept.drop(self)

    @served
    def everywhere(self) -> Array:
        """Return the whole of it as every rank has it in a replica, read-only. Collective.

        ``numpy.asarray`` returns a copy, and keeps no replica.
        """
        whole = self.replica("replicated").flat.reshape(self.shape)
        whole.flags.writeable = False
        return whole

    @served
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("a distributed array has to be copied")
        everywhere = self.space.layout(self.layout.shape, "replicated")
        whole = np.empty(self.size, self.dtype)
        if self.layout == everywhere:
            whole[:] = self.flat
        else:
            self.space.move(self, everywhere, whole)
        return whole.reshape(self.shape).astype(self.dtype if dtype is None else dtype, copy=False)

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

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: object) -> Self:
        return self.copy()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.dtype}, {self.layout}>"


def make(ndim: int, *inputs: Any, **options: Any) -> Any:
    """Return a matrix or vector, by its number of dimensions."""
    return DistributedArray._kinds[ndim](*inputs, **options)


def require_same_space(*arrays: DistributedArray) -> None:
    """Raise LayoutError unless all are of one group."""
    for array in arrays:
        if array.space is not arrays[0].space:
            raise LayoutError(f"{arrays[0]} and {array} are of different groups")
