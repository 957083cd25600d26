"""Remaps that are under way while their ranks compute (dMath)."""

from __future__ import annotations

from threading import Thread
from typing import Any

from pgasdl.errors import LayoutError, PgasTimeoutError
from pgasdl.matrix.homes import Homes, find_homes
from pgasdl.matrix.layout import Layout
from pgasdl.matrix.moves import Pieces, pieces_between
from pgasdl.matrix.serving import Numbered, served
from pgasdl.matrix.space import Space, require_converted


class RemapHandle(Numbered):
    """A remap under way, made by :meth:`DistributedMatrix.remap_async`."""

    def __init__(self, array: Any, result: Any, what: str) -> None:
        self.space: Space = array.space
        self._array, self._version, self._what = array, array.version, what
        self._result: Any = result
        self._thread: Thread | None = None
        self._error: Exception | None = None  # of the thread
        self._moving, self._taken = False, False

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
        space.remaps.append(self)  # peers read its blocks, and it reads theirs, until wait()
        self._moving = True
        if mapped:
            self._thread = Thread(target=self._copy, args=(homes[0], pieces), daemon=True)
            self._thread.start()
        else:
            homes[0].fetch(pieces, taken, space.queue)

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
                if self._moving:
                    with space.during("wait"):
                        steps(lambda: self._arrive(steps.left))
                        end = f"the end of a {self._what}"
                        steps(lambda: space.group.allgather(end, b"", steps.left))
                    space.remaps.remove(self)
                    self._moving = False
                else:
                    self._require_same()
                    space.move(self._array, self._result.layout, self._result.flat)
            self._require_same()
            self._result.take_number()
        self._taken = True
        return self._result

    def _copy(self, homes: Homes, pieces: Pieces) -> None:
        try:
            with self.space.during("move"):
                homes.fetch(pieces, self._result.flat)
        except Exception as error:
            self._error = error

    def _arrive(self, seconds: float) -> None:
        if self._thread is None:
            self.space.context.wait(self.space.queue, timeout=seconds)
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise PgasTimeoutError(f"the {self._what} takes longer than {seconds:g} s")
        if self._error is not None:
            raise self._error

    def _require_same(self) -> None:
        if self._array.version != self._version:
            raise LayoutError(f"{self._array} was changed before the end of its remap_async()")


def begin_remap(array: Any, wanted: Layout, dtype: Any) -> RemapHandle:
    """Begin to remap an array. Collective."""
    space: Space = array.space
    require_converted(array.dtype, dtype)
    what = f"remap of {array.identity} to {wanted.identity}, {dtype}, meanwhile"
    with space.steps(what) as steps:
        result = type(array)(space, wanted, dtype, numbered=False)
        handle = steps(lambda: RemapHandle(array, result, what))  # or that of a call that timed out
        if space.told is not None:
            space.move(array, wanted, result.flat)  # is noted
        else:
            steps(lambda: handle.begin(steps.left))
    return handle
