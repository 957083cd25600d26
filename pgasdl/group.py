"""Groups: ranks that act together, with a barrier and a small allreduce of their own."""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pgasdl import _native
from pgasdl.buffers import memory_of, native_dtype, require_host
from pgasdl.errors import BufferRefusedError, MismatchError, PgasTimeoutError, RankError
from pgasdl.plans import Members
from pgasdl.plans.plan import Sizes
from pgasdl.topology import Topology

Array = npt.NDArray[Any]
Operator = str | Callable[[Array, Array], Array]
T = TypeVar("T")
# By group: a call, its steps' results, and the same of an interrupted call inside it.
Unfinished = dict["Group", tuple[Hashable, list[Any], Any]]

_UFUNCS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
}
OPERATORS = ("sum", "mean", "min", "max", "prod")


class Group:
    """Ranks that act together. Made by :meth:`Context.group`; ``ctx.world`` holds all ranks.

    Only one collective of each kind (barriers; allreduces; making segments and handles) may be
    under way at a time: a second one raises MismatchError at once and changes nothing. Different
    kinds may overlap. After a timeout or Ctrl-C, call the collective again with the same
    arguments, from any thread, to continue it; until then others of its kind raise MismatchError.

    Attributes
    ----------
    mapped : bool
        Every member can load from and store to every other's segments.
    members : Members
        The ranks, as plans may know them; plans number those of a machine in a row.
    """

    def __init__(
        self,
        context: _native.ContextCore,
        topology: Topology,
        core: _native.GroupCore,
        deleted: Callable[[Group], None] | None = None,
    ) -> None:
        self.context = context
        self.topology = topology
        self.core = core
        self._deleted = deleted
        self._half_bound: object | None = None
        ranks = self.ranks
        self.mapped = mapped = topology.maps(ranks)
        self.members = Members(
            self.size,
            topology.node_size(ranks),
            mapped,
            mapped or topology.mapped_on_host,
            topology.registers(ranks),
            topology.oversubscribed,
            topology.supernode_size(ranks),
            topology.order(ranks),
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, in ascending order."""
        return tuple(self.core.ranks)

    @property
    def size(self) -> int:
        """Number of members."""
        return self.core.size

    @property
    def rank(self) -> int:
        """Place of this rank among the members."""
        return self.core.index

    @property
    def node_size(self) -> Sizes:
        """Ranks of a node, for plans that know nodes; plans number those of a machine in a row."""
        return self.members.node_size

    def barrier(self, *, timeout: float | None = None) -> None:
        """Wait until every member is here.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None: the context's default, 0: one try.

        Raises
        ------
        PgasTimeoutError
            Names the missing members; the next call continues this barrier.
        PeerLostError
            A member died, or closed its context before it came here.
        MismatchError
            Another thread of this rank is in the barrier, and stays there.

        Notes
        -----
        It takes ceil(log2 size) rounds of notifications (dissemination). Training needs no
        barrier. GASPI: gaspi_barrier.
        """
        self.core.barrier(timeout=timeout)

    def combine(
        self, array: npt.ArrayLike, op: Operator = "sum", *, timeout: float | None = None
    ) -> Array:
        """Return the combination of every member's array, in the order of the ranks. Collective.

        It is for small arrays and numbers, which it leaves as they are. For gradients use
        :meth:`Context.allreduce`, which replaces the array: ``ctx.allreduce(array, group=group)``.

        Parameters
        ----------
        array : array_like
            C-contiguous, same shape and dtype on all members.
        op : Operator, default "sum"
            "sum", "mean", "min", "max", "prod", or a function of two arrays (elementwise).
        timeout : float, optional
            Seconds; None: the context's default, 0: one try.

        Returns
        -------
        ndarray
            A new array, the same bits on every member.

        Raises
        ------
        BufferRefusedError
            Strided, on a device, or a dtype without arithmetic.
        MismatchError
            A member is in another collective, or came with another shape or dtype; another thread
            of this rank is in one; or an interrupted one was not continued.
        PgasTimeoutError
            The next call with the same array and arguments continues this one.
        PeerLostError
            A member died, or closed its context before it came here.

        Notes
        -----
        Every member gets every other's array: in one step with up to 16 members, else in
        ceil(log2 size) steps, in which members pass arrays on (Bruck et al., 1997).
        Integers wrap on overflow; the mean of integers is refused. float16 and bfloat16 are
        accumulated in float32. GASPI: gaspi_allreduce, gaspi_allreduce_user.
        """
        require_host(array)
        source = np.asarray(array)
        memory_of(source, writable=False)
        name = op if isinstance(op, str) else "function"
        if isinstance(op, str) and op not in OPERATORS:
            raise BufferRefusedError(
                f"operator {op!r}: one of {', '.join(OPERATORS)}, or a function"
            )
        if op == "mean" and not np.issubdtype(source.dtype, np.floating):
            native_dtype(source.dtype)
            if source.dtype.kind in "iu":
                raise BufferRefusedError("the mean of integers is not an integer: sum, then divide")
        if source.dtype.hasobject:
            raise BufferRefusedError("an array of Python objects cannot leave its process")
        signature = f"combine {name} {source.dtype} {source.shape}"
        blobs = self.core.allgather(
            True, signature, zlib.crc32(signature.encode()), source.tobytes(), timeout
        )
        return self._combine(blobs, source.dtype, op).reshape(source.shape)

    def allreduce(
        self, array: npt.ArrayLike, op: Operator = "sum", *, timeout: float | None = None
    ) -> Array:
        """Call :meth:`combine`, the name since 0.2: an allreduce works in place everywhere else."""
        warnings.warn(
            "Group.allreduce, which returns a new array, is Group.combine now; to reduce in place: "
            "ctx.allreduce(array, group=group)",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.combine(array, op, timeout=timeout)

    def _combine(self, blobs: list[bytes], dtype: np.dtype[Any], op: Operator) -> Array:
        arrays = [np.frombuffer(blob, dtype) for blob in blobs]
        if callable(op):
            total = arrays[0].copy()
            for other in arrays[1:]:
                total = np.asarray(op(total, other), dtype)
            return total
        try:
            element = native_dtype(dtype)
        except BufferRefusedError:
            total = arrays[0].copy()
            for other in arrays[1:]:
                total = _UFUNCS[op](total, other)
            return total
        out = np.empty_like(arrays[0])
        if out.size:
            _native.reduce(
                [(out.ctypes.data, element)],
                [(array.ctypes.data, element) for array in arrays],
                out.size,
                1 / len(arrays) if op == "mean" else 1.0,
                "sum" if op == "mean" else op,
            )
        return out

    def allgather(self, what: str, blob: bytes, timeout: float | None = None) -> list[bytes]:
        """Return every member's ``blob``, by member. Collective.

        ``what`` names the collective: members in different ones get a MismatchError.
        """
        return self.core.allgather(False, what, zlib.crc32(what.encode()), blob, timeout)

    def hold_half_bound(self, owner: object, address: int) -> None:
        """Keep memory whose binding is half done: members that are done with it may write there."""
        half_bound = self.core.half_bound
        if not half_bound:
            self._half_bound = None
        elif half_bound == address:
            self._half_bound = owner

    def delete(self) -> None:
        """Delete the group and its workspace of ``ctx.allreduce``; the world group stays.

        Its ranks can form a new one.
        """
        self.core.remove()
        if self._deleted is not None:
            self._deleted(self)

    def within(self, other: Group) -> bool:
        """Whether every member is in another group, too."""
        return self is other or set(self.ranks) <= set(other.ranks)

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks

    def index(self, rank: int) -> int:
        """Return a rank's place among the members; RankError if it is not a member."""
        if rank not in self.ranks:
            raise RankError(f"rank {rank} is not in the group {self.ranks}")
        return self.ranks.index(rank)

    def __repr__(self) -> str:
        return f"<Group {list(self.ranks)}>"


class Steps:
    """The collective steps of one call, such as making a handle.

    After a timeout or Ctrl-C the same call continues after the last finished step. Until it has,
    any other such call of the group is refused: the other ranks would take it for this one.
    """

    def __init__(
        self, unfinished: Unfinished, group: Group, call: Hashable, seconds: float
    ) -> None:
        self._deadline = time.monotonic() + seconds
        self._unfinished = unfinished
        self._group = group
        self._call = call
        begun, self._done, inside = unfinished.get(group, (call, [], None))
        if begun != call:
            raise MismatchError(
                f"{begun} timed out in {group}: call it again with the same arguments first"
            )
        self._at = 0
        unfinished.pop(group, None)
        if inside is not None:
            unfinished[group] = inside

    def __enter__(self) -> Steps:
        return self

    @property
    def left(self) -> float:
        """Seconds that remain for all steps."""
        return max(0.0, self._deadline - time.monotonic())

    def __call__(self, collective: Callable[[], T]) -> T:
        """Do the next step, or return its result if it was done before."""
        if self._at == len(self._done):
            self._done.append(collective())
        result: T = self._done[self._at]
        self._at += 1
        return result

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, (PgasTimeoutError, KeyboardInterrupt)):
            inside = self._unfinished.get(self._group)
            self._unfinished[self._group] = self._call, self._done, inside
        else:
            self._unfinished.pop(self._group, None)
