"""A master and its workers: rank 0 runs a program, and the others do what its matrices do.

Each operation that a program calls (:func:`served`) is sent to the workers by its name, before rank
0 does its own part. An operation inside another one is not sent: every rank comes to it by itself.
"""

from __future__ import annotations

import io
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from pgasdl import _native
from pgasdl.errors import BufferRefused, LayoutError, PeerLost, PlanError, Timeout
from pgasdl.group import Group

if TYPE_CHECKING:
    from pgasdl.context import Context

Function = TypeVar("Function", bound=Callable[..., Any])
_operations: dict[str, Callable[..., Any]] = {}
_masters: dict[Any, _Master] = {}  # by context: loopback has several in one process
# The same on all ranks, before anything has moved: the program may catch them, and go on.
_REFUSALS = (LayoutError, BufferRefused, PlanError, TypeError, ValueError, IndexError)
_LAST, _MORE = b"\0", b"\1"


class Numbered:
    """What a master and its workers know by a number."""

    number: int | None = None
    # Where to find its context.
    space: Any


def served(function: Function) -> Function:
    """Let workers do what a master calls. For functions of matrices, or of a context."""
    name = f"{function.__module__}.{function.__qualname__}"
    _operations[name] = function

    @wraps(function)
    def call(*inputs: Any, **options: Any) -> Any:
        master = _master_of((*inputs, *options.values())) if _masters else None
        if master is None or master.busy:
            return function(*inputs, **options)
        return master.run(name, inputs, options)

    return call  # type: ignore[return-value]


def serve(context: Context, program: Callable[..., Any], *inputs: Any) -> Any:
    """Run a program on rank 0 alone; all other ranks work for its matrices. Collective.

    The same program may run on all ranks, too, without a master. It makes its matrices itself, of
    all ranks, and gives nothing but values to other ranks: no ``blocks()``, no ``reader()``.

    Parameters
    ----------
    program : Callable
        Called with ``context`` and ``inputs`` on rank 0; nothing else but it may send passive
        messages (:meth:`Context.passive_send`) meanwhile.

    Returns
    -------
    object
        What the program returns; None on all other ranks.

    Raises
    ------
    TypeError
        An operand cannot be sent, such as a lambda: on rank 0, and nothing is lost.
    PeerLost
        A rank died. Other exceptions of the program end the work of all ranks, and are raised on
        rank 0.

    Notes
    -----
    dMath: its master and workers.

    >>> import pgasdl.matrix as pm
    >>> from pgasdl import loopback
    >>> def program(ctx):
    ...     a = pm.standard_normal(ctx, (64, 32), seed=1)
    ...     return (a.T @ a).shape
    >>> loopback.run(2, lambda ctx: pm.serve(ctx, program))
    [(32, 32), None]
    """
    if context.rank != 0:
        _Worker(context).work()
        return None
    master = _masters[context] = _Master(context)
    lost = None
    try:
        return program(context, *inputs)
    except PeerLost as error:
        lost = error
        raise
    finally:
        del _masters[context]
        master.end(lost)


def quiet(context: Context) -> AbstractContextManager[None]:
    """Send no operation that is called inside, as this rank alone calls it."""
    master = _masters.get(context)
    return nullcontext() if master is None else master.quiet()


def is_master(where: Context | Group) -> bool:
    """Whether this rank runs a program, and is not inside an operation."""
    master = _master_of((where,)) if _masters else None
    return master is not None and not master.busy


class Local:
    """An operand that only the master has; workers get one of None."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _master_of(values: Iterable[Any]) -> _Master | None:
    for value in values:
        if isinstance(value, Numbered):
            return _masters.get(value.space.context)
        if isinstance(value, Group | _native.ContextCore):
            return _masters.get(value.context if isinstance(value, Group) else value)
        if isinstance(value, dict) and (found := _master_of(value.values())) is not None:
            return found
    return None


def _label(result: Any, number: int) -> bool:
    """Give a new matrix its number; False: it has one, or it is none."""
    new = isinstance(result, Numbered) and result.number is None
    if new:
        result.number = number
    return new


class _Master:
    """Sends what rank 0 does to all others."""

    def __init__(self, context: Context) -> None:
        self.busy = False
        self._context = context
        self._next = 0
        self._dropped: deque[int] = deque()

    def run(self, name: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Do an operation on all ranks."""
        number = self._next
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self.send((dropped, name, number, inputs, options))
        self._next += 1
        with self.quiet():
            result = _operations[name](*inputs, **options)
        if _label(result, number):
            weakref.finalize(result, self._dropped.append, number).atexit = False
        return result

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Send nothing that is called inside."""
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def end(self, lost: PeerLost | None) -> None:
        """Let all workers end that are still there; ``lost``: which rank is not."""
        for rank in range(1, self._context.size):
            with nullcontext() if lost is None else suppress(PeerLost):
                self.send(lost, [rank])

    def send(self, what: object, ranks: Sequence[int] | None = None) -> None:
        """Send to workers, in messages of the length that there is; None: to all."""
        file = io.BytesIO()
        try:
            _Pickler(file, self._context).dump(what)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"workers cannot get this operand, for which they need its name: {error}"
            ) from error
        blob, longest = file.getvalue(), self._context.limits.passive_bytes - 1
        for begin in range(0, len(blob), longest):
            last = begin + longest >= len(blob)
            message = (_LAST if last else _MORE) + blob[begin : begin + longest]
            for rank in range(1, self._context.size) if ranks is None else ranks:
                self._context.passive_send(message, rank)


class _Worker:
    """Does what the master does, on any other rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._arrays: dict[int, Numbered] = {}

    def work(self) -> None:
        """Work until the master ends."""
        while isinstance(message := self._receive(), tuple):
            dropped, name, number, inputs, options = message
            for old in dropped:
                self._arrays.pop(old, None)
            try:
                result = _operations[name](*inputs, **options)
            except _REFUSALS:
                continue
            if _label(result, number):
                self._arrays[number] = result
        if isinstance(message, PeerLost):
            raise message

    def _receive(self) -> Any:
        blob, more = b"", True
        while more:
            try:
                sender, message = self._context.passive_receive()
            except Timeout:
                continue  # the master has something else to do; its end would raise PeerLost
            if sender != 0:
                raise BufferRefused(f"a passive message of rank {sender} to a worker of a master")
            more = message[:1] == _MORE
            blob += message[1:]
        return _Unpickler(io.BytesIO(blob), self._context, self._arrays).load()


class _Pickler(pickle.Pickler):
    """Names what workers have: matrices by their numbers."""

    def __init__(self, file: io.BytesIO, context: Context) -> None:
        super().__init__(file)
        self._context = context

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Numbered):
            if value.number is None or value.space.context is not self._context:
                raise LayoutError(f"{value} was not made by the program that runs on a master")
            return "matrix", value.number
        if value is self._context:
            return "context", 0
        if isinstance(value, Group):
            if value is not self._context.world:
                raise LayoutError("a master's matrices are of all ranks, not of a group")
            return "world", 0
        return ("local", 0) if isinstance(value, Local) else None


class _Unpickler(pickle.Unpickler):
    """Takes what the master named. A message is from rank 0, which runs the same program."""

    def __init__(self, file: io.BytesIO, context: Context, arrays: dict[int, Numbered]) -> None:
        super().__init__(file)
        self._context, self._arrays = context, arrays

    def persistent_load(self, what: tuple[str, int]) -> Any:
        kind, number = what
        if kind == "matrix":
            return self._arrays[number]
        return {"context": self._context, "world": self._context.world, "local": Local(None)}[kind]
