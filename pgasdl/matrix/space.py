"""Spaces: what the matrices of a group share, and how their blocks move."""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pgasdl import _native
from pgasdl.collectives.pairwise import PairwiseCalls, Remap, inbox_bytes, notifications
from pgasdl.errors import LayoutError, MismatchError, PlanError
from pgasdl.group import Group, Steps
from pgasdl.matrix.elements import Array, core_dtype
from pgasdl.matrix.explain import MAPPED, NETWORK, Explanation
from pgasdl.matrix.homes import find_homes
from pgasdl.matrix.kept import Kept
from pgasdl.matrix.layout import Layout, Shape, named
from pgasdl.matrix.moves import Pieces, moves_between, pieces_between
from pgasdl.matrix.serving import quiet, served
from pgasdl.matrix.spare import Spare
from pgasdl.plans.cost import Model

if TYPE_CHECKING:
    from pgasdl.context import Context


_NOT_NOTED = nullcontext()
# Smaller matrices are sent: telling where they lie takes longer than copying them twice.
_LEAST_LOADED = 1 << 20
# Bytes of all ranks' arrays that each gets, and reduces itself: in one step, with the agreement.
_MOST_GATHERED = 16 << 10
UFUNCS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
# By space. Of this thread alone: others go on.
_TOLD: ContextVar[Mapping[Space, Explanation]] = ContextVar("told", default=MappingProxyType({}))


class Span(NamedTuple):
    """What a rank did for its matrices, in seconds of ``time.monotonic()``.

    Attributes
    ----------
    kind : str
        "compute": multiplied or added; "move": copied, or posted reads; "wait": waited for peers,
        or for what it reads.
    begin, end : float
    """

    kind: str
    begin: float
    end: float


class Space:
    """What the matrices of a group share: notifications, and memory through which blocks move.

    Matrices lie in memory that no peer touches: in the pool, where the group has one.

    Layouts name the ranks of the group by their places in it.
    """

    def __init__(self, context: Context, group: Group) -> None:
        self.context, self.group, self.rank = context, group, group.rank
        # What this rank does, if anybody wants to know it.
        self.spans: list[Span] | None = None
        self.n_arrays, self.spare, self.kept = 0, Spare(), Kept()
        self.namespace: Any = None  # of the array API, once somebody has asked for it
        self.remaps: list[Any] = []  # under way: their memory stays until they have ended
        segments, size = context.segments, group.size
        flags, nbytes = notifications(group), inbox_bytes(group)
        with self.steps("the first matrix") as steps:
            self._segment = steps(
                lambda: segments.make(group, nbytes, flags + size, steps.left, workspace=True)
            )
        self._numbers = _native.Numbering(self._segment, 0, flags, exclusive=True)
        self._calls = PairwiseCalls(group, self._segment, 0, self._numbers)

    @cached_property
    def queue(self) -> int:
        """The queue of reads that products do not wait for."""
        return self.context.queue_create()

    @property
    def told(self) -> Explanation | None:
        """Where it is noted what would move, while nothing does in this thread; None: it moves."""
        return _TOLD.get().get(self)

    @property
    def model(self) -> Model:
        """The machine that times are predicted for."""
        told = self.told
        if told is not None:
            return told.model
        return MAPPED if self.group.mapped else NETWORK

    def layout(self, shape: Shape, wanted: Layout | str) -> Layout:
        """Return the layout of a name, on all ranks of the group; LayoutError: it does not fit."""
        size = self.group.size
        if isinstance(wanted, str):
            return named(wanted, shape, size)
        if wanted.shape != shape or max(wanted.ranks, default=0) >= size:
            raise LayoutError(f"{wanted} for a matrix of {shape[0]} x {shape[1]} on {size} ranks")
        return wanted

    def move(
        self,
        array: Any,
        target: Layout,
        taken: Array,
        at: tuple[int, int] | None = None,
    ) -> None:
        """Fill ``taken``, this rank's part of ``target``, from all ranks' parts. Collective.

        ``at`` is where the target begins in the array, if it is a part of that. Integers are not
        converted: PlanError.
        """
        source, given = array.layout, array.flat
        require_converted(given.dtype, taken.dtype)
        told = self.told
        if told is not None:
            told.note_move(source, target, at, min(given.itemsize, taken.itemsize))
            return
        what = f"remap of {array.identity} to {target.identity}, {taken.dtype}, at {at}"
        large = target.size * given.itemsize >= _LEAST_LOADED
        with self.steps(what) as steps:
            goal = steps(lambda: taken)  # or that of the same call, if it timed out
            pieces = partial(pieces_between, source, target, self.rank, self.group.size, at)
            if not (large and self.group.mapped and self._load(steps, what, given, pieces, goal)):
                self._send(steps, what, (source, target, at), given, goal)
            if goal is not taken:
                taken[:] = goal

    def _load(
        self, steps: Steps, what: str, given: Array, pieces: Callable[[], Pieces], taken: Array
    ) -> bool:
        """Fill ``taken`` out of peers' memory; False: some rank's part lies outside the pool."""
        with self.during("wait"):
            homes, outside = steps(lambda: find_homes(self.group, what, [given], steps.left))
        if not outside:
            with self.during("move"):
                steps(lambda: homes[0].fetch(pieces(), taken))
            with self.during("wait"):
                steps(lambda: self.group.barrier(timeout=steps.left))
        return not outside

    def _send(
        self,
        steps: Steps,
        what: str,
        way: tuple[Layout, Layout, tuple[int, int] | None],
        given: Array,
        taken: Array,
    ) -> None:
        """Fill ``taken`` by a plan that all ranks make."""
        names = core_dtype(given.dtype), core_dtype(taken.dtype)

        def describe() -> Remap:
            source, target, at = way
            moves = moves_between(source, target, self.rank, self.group.size, at)
            return Remap(f"{source.identity} to {target.identity} at {at}", moves, *names)

        bound = self._calls.bound((*way, *names), describe)
        places = [array.ctypes.data if array.size else 0 for array in (given, taken)]
        mark = zlib.crc32(what.encode())
        self._numbers.enter("a remap of a matrix")
        try:
            with self.during("move"):
                for execution, _ in bound.parts:
                    run = partial(execution.run_at, (given, taken), [*places, 0], mark=mark)
                    steps(run)
        except MismatchError as error:
            raise MismatchError(f"{what}: {error}") from error
        finally:
            self._numbers.leave()

    def during(self, kind: str) -> AbstractContextManager[None]:
        """Note what is done inside, if anybody wants to know it."""
        return _NOT_NOTED if self.spans is None else self._noted(kind, self.spans)

    @contextmanager
    def _noted(self, kind: str, spans: list[Span]) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            spans.append(Span(kind, begin, time.monotonic()))

    def steps(self, what: str) -> Steps:
        """Return the steps of an operation: all ranks must agree on what it is."""
        state = self.context.state
        return Steps(state.unfinished, self.group, what, self.context._seconds(None))

    def gather(self, what: str, *numbers: float) -> list[tuple[float, ...]]:
        """Return every rank's numbers. Collective; ``what``: as :meth:`reduce`."""
        told = self.told
        if told is not None:
            told.note_reduction(np.array(numbers))
            return [numbers]
        form = f"{len(numbers)}d"
        all_ranks = self.group.allgather(what, struct.pack(form, *numbers))
        return [struct.unpack(form, each) for each in all_ranks]

    def reduce(self, what: str, array: Array, op: str = "sum") -> Array:
        """Return the sum of every rank's array, or "min", "max" or "prod". Collective.

        All ranks must agree on ``what``. A long array may hold the result.
        """
        told = self.told
        if told is not None:
            told.note_reduction(array)
            return array
        small = array.nbytes * self.group.size <= _MOST_GATHERED
        if array.size == 1 or small or op == "prod":  # which collectives do not have
            all_ranks = b"".join(self.group.allgather(what, array.tobytes()))
            parts = np.frombuffer(all_ranks, array.dtype).reshape(self.group.size, -1)
            return UFUNCS[op].reduce(parts, 0, array.dtype)  # type: ignore[no-any-return]
        with self.steps(what) as steps:
            result = steps(lambda: array)  # or that of the same call, if it timed out
            steps(lambda: self.group.allgather(what, b"", steps.left))
            steps(lambda: self.context.allreduce(result, op, group=self.group))
        return result

    def empty(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return memory for a rank's blocks: out of the group's pool, if that has room."""
        found = self.context._pool.host_bytes(count * dtype.itemsize, self.group)
        return self.spare.empty(count, dtype) if found is None else found.view(dtype)

    def close(self) -> None:
        """Give up the executions and, unless peers may still write there, the memory."""
        broken = self._numbers.under_way or self._numbers.failed
        self._calls.close()
        if "queue" in vars(self) and not self.remaps and not self.context.closed:
            self.context.queue_delete(self.queue)
        if self.group.mapped or not broken:
            self._segment.close()


def require_converted(given: np.dtype[Any], taken: np.dtype[Any]) -> None:
    """Raise PlanError, on all ranks, for dtypes that are not converted on the way."""
    if given != taken and {given.kind, taken.kind} & {"i", "b"}:
        raise PlanError(
            f"{given} to {taken}: integers and bool are not converted on the way;"
            " use astype() first"
        )


@served
def space_of(where: Context | Group) -> Space:
    """Return the space of a group, or of all ranks of a context. Collective at its first use."""
    group: Group = where if isinstance(where, Group) else where.world
    context: Any = group.context
    made: Space = context.state.belonging(group, Space, lambda: Space(context, group))
    return made


@served
def keep(where: Context | Group, nbytes: int) -> None:
    """Let products keep what they read of peers' blocks. Collective in a group's first use.

    A later product of the same matrix, transposed or not, then reads only what is not there. A
    matrix is kept until it is changed; the one that was not used for the longest time makes room.
    Nothing is kept where ranks map each other's memory, and of matrices outside the pool, which
    products replicate.

    Parameters
    ----------
    where : Context or Group
        Of the matrices.
    nbytes : int
        At most, on each rank, in the pool; each matrix takes its whole size. 0, as at first:
        nothing is kept.

    Notes
    -----
    dMath: blocks that pass by in the forward pass need not be sent again in the backward pass.
    """
    if nbytes < 0:
        raise ValueError(f"keep {nbytes} bytes: 0 or more")
    kept = space_of(where).kept
    kept.limit = nbytes
    kept.shrink(nbytes)


@contextmanager
def trace(where: Context | Group) -> Iterator[list[Span]]:
    """Record what this rank does for its matrices inside a ``with`` statement, in order.

    Examples
    --------
    >>> import pgasdl.matrix as pm
    >>> from pgasdl import loopback
    >>> def program(ctx):
    ...     a = pm.zeros(ctx, (64, 64))
    ...     with pm.trace(ctx) as spans:
    ...         a @ a
    ...     return {span.kind for span in spans} >= {"compute"}
    >>> loopback.run(2, program)
    [True, True]
    """
    space = space_of(where)
    before, space.spans = space.spans, []
    try:
        yield space.spans
    finally:
        space.spans = before


def explain(
    where: Context | Group, expression: Callable[[], Any], model: Model | None = None
) -> Explanation:
    """Return what an expression of matrices would move. Nothing moves, and nothing is kept.

    What replicas spare is not in it.

    Parameters
    ----------
    where : Context or Group
        Of the matrices.
    expression : Callable[[], object]
        It changes no matrix but those that it makes: ``lambda: np.tanh(a + b).sum(0)``. Its result
        is meaningless.
    model : Model, optional
        The machine that times are predicted for; None: the order of magnitude of memory or, where
        ranks do not map each other's memory, of a network of 80 Gbit/s.

    Returns
    -------
    Explanation
        The same on all ranks.

    Raises
    ------
    LayoutError
        The expression changes a matrix.
    """
    space = space_of(where)
    told = Explanation(space.group.size, space.group.mapped, model or space.model)
    before = _TOLD.set({**_TOLD.get(), space: told})
    try:
        with quiet(space.context):
            expression()
    finally:
        _TOLD.reset(before)
    return told
