"""Groups: some ranks that act together, with a barrier and a small allreduce of their own."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pgasdl import _native
from pgasdl.buffers import memory_of, native_dtype
from pgasdl.errors import BufferRefused, RankError
from pgasdl.routes import node_size

if TYPE_CHECKING:
    from pgasdl.context import Context

Array = npt.NDArray[Any]
Operator = str | Callable[[Array, Array], Array]

_UFUNCS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
}
OPERATORS = ("sum", "mean", "min", "max", "prod")


class Group:
    """Ranks that act together. Made by :meth:`Context.group`; ``ctx.world`` holds all ranks.

    One collective of each kind may be under way at a time, and different kinds overlap. A
    collective that timed out is continued by calling it again with the same arguments.
    """

    def __init__(self, context: Context, core: _native.GroupCore) -> None:
        self.context = context
        self.core = core
        self._partial: tuple[int, int, list[Array]] | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, ascending."""
        return tuple(self.core.ranks)

    @property
    def size(self) -> int:
        """Number of members."""
        return self.core.size

    @property
    def rank(self) -> int:
        """This rank's place among the members."""
        return self.core.index

    @cached_property
    def node_size(self) -> int:
        """Ranks of a node, as plans with nodes take it: neighbours that share a machine."""
        return node_size([self.context.hosts[rank] for rank in self.ranks])

    @cached_property
    def mapped(self) -> bool:
        """Whether every member can load from and store to every other's segments."""
        return self.context.maps(self.ranks)

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every member is here.

        Parameters
        ----------
        timeout : seconds; None: the context's default, 0: one try

        Raises
        ------
        Timeout    names who is missing; the next call continues this barrier
        PeerLost   a member died, or closed its context before it came here

        Notes
        -----
        ceil(log2 size) rounds of notifications (dissemination). Nothing in training needs a
        barrier. GASPI: gaspi_barrier.
        """
        self.core.barrier(timeout)

    def allreduce(
        self, array: npt.ArrayLike, op: Operator = "sum", timeout: float | None = None
    ) -> Array:
        """Combine every member's array, element by element, in the order of the ranks.

        For small arrays: every member gets every other's. Use :meth:`Context.allreduce` for
        gradients.

        Parameters
        ----------
        array : C-contiguous, same shape and dtype on all members
        op : "sum", "mean", "min", "max", "prod", or a function of two arrays (elementwise)
        timeout : seconds; None: the context's default, 0: one try

        Returns
        -------
        ndarray : a new array, the same bits on every member

        Raises
        ------
        BufferRefused   strided, or no dtype to compute with
        MismatchError   a member is in another collective, or came with another shape or dtype
        Timeout         the next call with the same arguments continues this one
        PeerLost        a member died

        Notes
        -----
        Integers wrap on overflow; the mean of integers is refused. float16 and bfloat16 are
        accumulated in float32. GASPI: gaspi_allreduce, gaspi_allreduce_user.
        """
        source = np.asarray(array)
        memory_of(source, writable=False)
        name = op if isinstance(op, str) else "function"
        if isinstance(op, str) and op not in OPERATORS:
            raise BufferRefused(f"operator {op!r}: one of {', '.join(OPERATORS)}, or a function")
        if op == "mean" and not np.issubdtype(source.dtype, np.floating):
            native_dtype(source.dtype)
            if source.dtype.kind in "iu":
                raise BufferRefused("the mean of integers is not an integer: sum, then divide")
        if source.dtype.hasobject:
            raise BufferRefused("an array of Python objects cannot leave its process")
        result = np.empty_like(source)
        chunks = self._chunks(source)
        signature = f"allreduce {name} {source.dtype} {source.shape}"
        fingerprint = zlib.crc32(signature.encode())
        done: list[Array] = []
        if self._partial is not None and self._partial[0] == fingerprint:
            done = self._partial[2]
        limit = self.context.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        flat = result.reshape(-1)
        position = 0
        for number, chunk in enumerate(chunks):
            if number >= len(done):
                self._partial = (fingerprint, number, done)
                left = limit if number == 0 else max(0.0, deadline - time.monotonic())
                blobs = self.core.allgather(True, signature, fingerprint, chunk.tobytes(), left)
                done.append(self._combine(blobs, chunk.dtype, op))
            flat[position : position + chunk.size] = done[number]
            position += chunk.size
        self._partial = None
        return result

    def _chunks(self, source: Array) -> list[Array]:
        flat = source.reshape(-1)
        per_chunk = max(1, _native.GroupCore.reduce_bytes // max(1, source.dtype.itemsize))
        if source.dtype.itemsize > _native.GroupCore.reduce_bytes:
            raise BufferRefused(
                f"an element of {source.dtype.itemsize} bytes: at most "
                f"{_native.GroupCore.reduce_bytes}"
            )
        # An empty array still synchronizes, as its members expect.
        return [flat[i : i + per_chunk] for i in range(0, max(1, flat.size), per_chunk)]

    def _combine(self, blobs: list[bytes], dtype: np.dtype[Any], op: Operator) -> Array:
        arrays = [np.frombuffer(blob, dtype) for blob in blobs]
        if callable(op):
            total = arrays[0].copy()
            for other in arrays[1:]:
                total = np.asarray(op(total, other), dtype)
            return total
        try:
            element = native_dtype(dtype)
        except BufferRefused:
            total = arrays[0].copy()
            for other in arrays[1:]:
                total = _UFUNCS[op](total, other)
            return total
        out = np.empty_like(arrays[0])
        if out.size:
            _native.reduce(
                [(memory_of(out).address, element)],
                [(memory_of(array, writable=False).address, element) for array in arrays],
                out.size,
                1 / len(arrays) if op == "mean" else 1.0,
                "sum" if op == "mean" else op,
            )
        return out

    def allgather(self, what: str, blob: bytes, timeout: float | None = None) -> list[bytes]:
        """Every member's ``blob`` (at most 1 KiB each), by member.

        ``what`` names the collective: members that are in different ones get a MismatchError.
        """
        return self.core.allgather(False, what, zlib.crc32(what.encode()), blob, timeout)

    def delete(self) -> None:
        """Give the group up; its ranks can form a new one. The world group stays."""
        self.core.remove()

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks

    def index(self, rank: int) -> int:
        """A rank's place among the members; RankError if it is none."""
        if rank not in self.ranks:
            raise RankError(f"rank {rank} is not in the group {self.ranks}")
        return self.ranks.index(rank)

    def __repr__(self) -> str:
        return f"<Group {list(self.ranks)}>"
