"""Remaps that are under way while their ranks compute (dMath)."""

from __future__ import annotations

import weakref
from threading import Thread
from typing import Any

from pgasdl.errors import LayoutError, PgasTimeoutError
from pgasdl.matrix.homes import Homes, find_homes
from pgasdl.matrix.layout import Layout
from pgasdl.matrix.moves import Pieces, pieces_between
from pgasdl.matrix.serving import Numbered, served
from pgasdl.matrix.space import Space, require_converted


class _Moving:
    """Blocks under way. Their memory stays until all ranks have theirs, also if nobody waits."""

    def __init__(self, handle: RemapHandle, array: Any, result: Any) -> None:
        self._handle, self._array, self._result = weakref.ref(handle), array, result
        self._space: Space = array.space
        self._thread: Thread | None = None
        self._error: Exception | None = None  # of the thread

    def begin(self, homes: Homes, pieces: Pieces) -> None:
        """Begin to fetch them: by a thread, or by reads."""
        if self._space.group.mapped:
            self._thread = Thread(target=self._copy, args=(homes, pieces), daemon=True)
            self._thread.start()
        else:
            homes.fetch(pieces, self._result.flat, self._space.queue)

    def _copy(self, homes: Homes, pieces: Pieces) -> None:
        try:
            with self._space.during("move"):
                homes.fetch(pieces, self._result.flat)
        except Exception as error:
            self._error = error

    def arrive(self, what: str, seconds: float) -> None:
        """Wait until they are here."""
        if self._thread is None:
            self._space.context.wait(self._space.queue, timeout=seconds)
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise PgasTimeoutError(f"the {what} takes longer than {seconds:g} s")
        if self._error is not None:
            raise self._error

    def is_over(self) -> bool:
        """Whether they are here, and nobody can wait for them any more."""
        if self._handle() is not None:
            return False
        try:
            if self._thread is None:
                self._space.context.wait(self._space.queue, timeout=0)
        except PgasTimeoutError:
            return False
        return self._thread is None or not self._thread.is_alive()


def _let_go(space: Space, seconds: float) -> None:
    """Free the memory of remaps that are over on all ranks. Collective."""
    if not space.remaps:
        return
    over = " ".join(str(n) for n, each in enumerate(space.remaps) if each.is_over())
    what = f"{len(space.remaps)} remaps under way"
    told = space.group.allgather(what, over.encode(), seconds)
    ended = set.intersection(*({*map(int, each.split())} for each in told))
    space.remaps = [each for n, each in enumerate(space.remaps) if n not in ended]


class RemapHandle(Numbered):
    """A remap under way, made by :meth:`DistributedMatrix.remap_async`."""

    def __init__(self, array: Any, result: Any, what: str) -> None:
        self.space: Space = array.space
        self._array, self._version, self._what = array, array.version, what
        self._result: Any = result
        self._moving: _Moving | None = None
        self._taken = False

    def begin(self, seconds: float) -> None:
        """Learn where the blocks lie, and begin to fetch them. Collective."""
        space, source, taken = self.space, self._array.flat, self._result.flat
        mapped = space.group.mapped
        if source.dtype != taken.dtype and not mapped:
            return  # a read does not convert
        buffers = [] if mapped else [taken]
        homes, outside = find_homes(space.group, self._what, [source], seconds, buffers)
        if outside:
            return
        layouts = self._array.layout, self._result.layout
        pieces = pieces_between(*layouts, space.rank, space.group.size)
        self._moving = _Moving(self, self._array, self._result)
        # Peers read its blocks, and it reads theirs, until wait().
        space.remaps.append(self._moving)
        self._moving.begin(homes[0], pieces)

    @served
    def wait(self) -> Any:
        """Return the matrix in its new layout. Collective: all ranks wait in the same order.

        Raises
        ------
        LayoutError
            The matrix was changed meanwhile.
        PeerLostError, PgasTimeoutError
            After the latter the same call goes on.
        """
        space = self.space
        if self._taken:
            return self._result
        if space.told is None:
            with space.steps(f"the end of a {self._what}") as steps:
                moving = self._moving
                if moving is not None:
                    with space.during("wait"):
                        steps(lambda: moving.arrive(self._what, steps.left))
                        end = f"the end of a {self._what}"
                        steps(lambda: space.group.allgather(end, b"", steps.left))
                    space.remaps.remove(moving)
                    self._moving = None
                else:
                    self._require_same()
                    space.move(self._array, self._result.layout, self._result.flat)
            self._require_same()
            self._result.take_number()
        self._taken = True
        return self._result

    def _require_same(self) -> None:
        if self._array.version != self._version:
            raise LayoutError(f"{self._array} was changed before the end of its remap_async()")


def begin_remap(array: Any, wanted: Layout, dtype: Any) -> RemapHandle:
    """Begin to remap an array. Collective."""
    space: Space = array.space
    require_converted(array.dtype, dtype)
    what = f"remap of {array.identity} to {wanted.identity}, {dtype}, meanwhile"
    with space.steps(what) as steps:
        if space.told is None:
            steps(lambda: _let_go(space, steps.left))
        result = type(array)(space, wanted, dtype, numbered=False)
        handle = steps(lambda: RemapHandle(array, result, what))  # or that of a call that timed out
        if space.told is not None:
            space.move(array, wanted, result.flat)  # is noted
        else:
            steps(lambda: handle.begin(steps.left))
    return handle
