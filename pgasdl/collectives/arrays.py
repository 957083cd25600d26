"""``ctx.broadcast``, ``ctx.all_gather`` and ``ctx.reduce_scatter``: arrays of the host, pairwise.

All of a group share one workspace, which the first makes, and one numbering: ranks that are in
different ones get a MismatchError.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from pgasdl.buffers import Memory, memory_of
from pgasdl.collectives.allreduce import Allreduces, GroupAllreduce
from pgasdl.collectives.bound import checked, kind_of, reduction_of
from pgasdl.collectives.pairwise import Pairs
from pgasdl.collectives.state import CollectiveState
from pgasdl.errors import BufferRefusedError, MismatchError, PgasTimeoutError
from pgasdl.group import Group
from pgasdl.plans.algorithms.pairwise import Blocks


class _Interrupted(NamedTuple):
    call: Hashable
    result: Any
    places: list[int]
    part: int
    kept: list[Any]


class ArrayCollectives:
    """The calls of a context."""

    def __init__(self, state: CollectiveState) -> None:
        self._core = state.core
        self._workspaces = Allreduces(state, None)
        self._made: dict[Group, GroupAllreduce] = {}
        self._interrupted: dict[Group, _Interrupted] = {}

    def broadcast(self, array: Any, root: int, group: Group, timeout: float | None) -> Any:
        """Give every member the array of ``root``, a rank of the job."""
        place = group.index(root)
        memory = memory_of(array)
        n, here = memory.nbytes, group.rank == place
        what = f"broadcast of {n} bytes of {memory.dtype} from rank {root}"
        only = [index == place for index in range(group.size)]

        def pairs() -> Pairs:
            sends = tuple(n if here and not it else 0 for it in only)
            receives = tuple(n if it and not here else 0 for it in only)
            return Pairs(what, "bytes", Blocks(sends, receives, n, same=True))

        places = [memory.address, *(memory.address if it else 0 for it in only)]
        return self._run(group, what, pairs, array, lambda: (array, places), timeout)

    def all_gather(self, array: Any, out: Any, group: Group, timeout: float | None) -> Any:
        """Give every member the arrays of all, one after the other."""
        memory, size = memory_of(array, writable=False), group.size
        n = memory.nbytes
        what = f"all_gather of {n} bytes of {memory.dtype} each"

        def pairs() -> Pairs:
            return Pairs(what, "bytes", Blocks((n,) * size, (n,) * size, n, same=True))

        def results() -> tuple[Any, list[int]]:
            result, at = _result(array, out, (size, *_shape(array, memory)), memory, n * size)
            return result, [memory.address, *(at + n * place for place in range(size))]

        return self._run(group, what, pairs, array, results, timeout)

    def reduce_scatter(
        self, array: Any, op: str, out: Any, group: Group, timeout: float | None
    ) -> Any:
        """Give every member its block of the arrays' reduction."""
        memory, size = checked(array, kind_of(op), reduction_of(op)), group.size
        if memory.device is not None:
            raise BufferRefusedError(
                "reduce_scatter takes arrays of the host; for one on a GPU: "
                'ctx.collective_handle("reduce-scatter", ...)'
            )
        shape = _shape(array, memory)
        if not shape or shape[0] % size:
            raise BufferRefusedError(
                f"reduce_scatter of an array of shape {shape} among {size} ranks: the first "
                "dimension is a multiple of their number"
            )
        n, nbytes = memory.count // size, memory.nbytes // size
        what = f"reduce_scatter of {memory.count} x {memory.native_dtype}, {op}"

        def pairs() -> Pairs:
            scale = 1 / size if op == "mean" else 1.0
            blocks = Blocks((n,) * size, (n,) * size, n, reduces=True, scale=scale)
            return Pairs(what, memory.native_dtype, blocks, reduction_of(op))

        def results() -> tuple[Any, list[int]]:
            parts = (shape[0] // size, *shape[1:])
            result, at = _result(array, out, parts, memory, nbytes)
            return result, [*(memory.address + nbytes * place for place in range(size)), at]

        return self._run(group, what, pairs, array, results, timeout)

    def _run(
        self,
        group: Group,
        what: str,
        pairs: Callable[[], Pairs],
        array: Any,
        results: Callable[[], tuple[Any, list[int]]],
        timeout: float | None,
    ) -> Any:
        """Run a call, or the rest of one that was interrupted; return its result."""
        self._core._require_peer(self._core.rank, what)
        limit = self._core._seconds(timeout)
        deadline = time.monotonic() + limit
        made, call = self._made.get(group), (what, memory_of(array, writable=False).address)
        begun = self._interrupted.get(group)
        if begun is not None and begun.call != call:
            raise MismatchError(
                f"{begun.call[0]} timed out in {group}: call it again with the same array first"  # type: ignore[index]
            )
        _, result, places, first, kept = begun or _Interrupted(call, *results(), 0, [])
        if made is None:
            made = self._made[group] = self._workspaces.begin_pairwise(group, limit)
        assert made.pairwise is not None
        made.enter(what)
        part = first
        try:
            bound = made.pairwise.bound(what, pairs)
            kept += bound.apart(places)
            for execution, offset in bound.parts[first:]:
                here = [each and each + offset for each in (*places, 0)]
                left = max(0.0, deadline - time.monotonic())
                execution.run_at((array, result, kept), here, timeout=left)
                part += 1
        except (PgasTimeoutError, KeyboardInterrupt):
            self._interrupted[group] = _Interrupted(call, result, places, part, kept)
            raise
        except MismatchError as error:
            raise MismatchError(f"{what}: {error}") from error
        finally:
            made.leave()
        self._interrupted.pop(group, None)
        return result

    def drop(self, group: Group) -> None:
        """Release a group's memory: the group is deleted."""
        self._made.pop(group, None)
        self._interrupted.pop(group, None)
        self._workspaces.drop(group)

    def forget(self) -> None:
        """Forget where arrays lie."""
        self._workspaces.forget()

    def clear(self) -> None:
        """Release all memory: the context is closed."""
        self._made.clear()
        self._interrupted.clear()
        self._workspaces.clear()


def _shape(array: Any, memory: Memory) -> tuple[int, ...]:
    return tuple(getattr(array, "shape", (memory.count,)))


def _result(
    array: Any, out: Any, shape: tuple[int, ...], memory: Memory, nbytes: int
) -> tuple[Any, int]:
    """Return the array of the result and its address: ``out``, or one like ``array``."""
    if out is None:
        new = getattr(array, "new_empty", None)  # of a tensor
        out = np.empty(shape, memory.dtype) if new is None else new(shape)
    into = memory_of(out)
    if (into.dtype, into.nbytes) != (memory.dtype, nbytes):
        raise BufferRefusedError(
            f"out is {into.dtype} x {into.count}, but the result {memory.dtype} of shape {shape}"
        )
    return out, into.address
