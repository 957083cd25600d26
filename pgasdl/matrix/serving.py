"""A master and its workers: rank 0 runs a program, and the others do what its matrices do.

Each operation that a program calls (:func:`served`) is sent to the workers by its name, before rank
0 does its own part. An operation inside another one is not sent: every rank comes to it by itself.
After each one, all ranks tell whether it failed there.
"""

from __future__ import annotations

import builtins
import json
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from pgasdl import _native, errors
from pgasdl.errors import (
    BufferRefusedError,
    LayoutError,
    MismatchError,
    PeerLostError,
    PgasTimeoutError,
    PlanError,
)
from pgasdl.group import Group
from pgasdl.matrix.message import decode, encode

if TYPE_CHECKING:
    from pgasdl.context import Context

Function = TypeVar("Function", bound=Callable[..., Any])
_operations: dict[str, Callable[..., Any]] = {}
_masters: dict[Any, _Master] = {}  # by context: loopback has several in one process
_FIRST, _MORE = 2, 1  # flags of a message's first byte


class Numbered:
    """What a master and its workers know by a number."""

    # The master or worker that it belongs to, and the number there.
    label: tuple[object, int] | None = None
    # Where to find its context.
    space: Any


def served(function: Function) -> Function:
    """Let workers do what a master calls. For functions of matrices, or of a context."""
    name = f"{function.__module__}.{function.__qualname__}"
    _operations[name] = function

    @wraps(function)
    def call(*inputs: Any, **options: Any) -> Any:
        master = _master_of([inputs, options]) if _masters else None
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
        An operand cannot be sent: a function that is not NumPy's, say. On rank 0, and nothing is
        lost.
    PgasTimeoutError
        A worker has not taken, or not ended, an operation. Later ones raise it, too.
    PeerLostError
        A rank died. Other exceptions of the program end the work of all ranks, and are raised on
        rank 0. What an operation raises, on rank 0 or on any worker, the program may catch.

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
    if context in _masters:
        raise PlanError("serve() inside of serve(): call the program itself")
    master = _masters[context] = _Master(context)
    try:
        result = program(context, *inputs)
    except BaseException as error:
        master.give_up(error)
        raise
    else:
        master.send(None)
        return result
    finally:
        del _masters[context]


def quiet(context: Context) -> AbstractContextManager[None]:
    """Send no operation that is called inside, as this rank alone calls it."""
    master = _masters.get(context)
    return nullcontext() if master is None else master.quiet()


def is_master(where: Context | Group) -> bool:
    """Whether this rank runs a program, and is not inside an operation."""
    master = _master_of(where) if _masters else None
    return master is not None and not master.busy


class Local:
    """An operand that only the master has; workers get one of None."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _master_of(value: Any) -> _Master | None:
    """Return the master of the first matrix, group or context in some operands."""
    if isinstance(value, Numbered):
        return _masters.get(value.space.context)
    if isinstance(value, Group | _native.ContextCore):
        return _masters.get(value.context if isinstance(value, Group) else value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next(filter(None, map(_master_of, value)), None)
    return None


def _is_new(result: Any, owner: object) -> bool:
    """Whether it is a matrix that has no number here yet."""
    return isinstance(result, Numbered) and (result.label is None or result.label[0] is not owner)


def _told_by_all(context: Context, mine: bytes) -> list[bytes]:
    """Return how an operation ended on each rank.

    A worker waits as long as the master takes, which may have been elsewhere in the operation.
    """
    while True:
        try:
            return context.world.allgather("the end of an operation", mine)
        except (PgasTimeoutError, MismatchError):
            if context.rank == 0:
                raise


def _described(error: Exception) -> bytes:
    """Return the names of an exception's classes, and its text."""
    return json.dumps([[kind.__name__ for kind in type(error).__mro__], str(error)]).encode()


def _raised(rank: int, blob: bytes) -> Exception:
    """Return an exception of the nearest class that is known here."""
    names, text = json.loads(blob)
    kinds = (getattr(errors, name, None) or getattr(builtins, name, None) for name in names)
    text = f"rank {rank}: {names[0]}: {text}"
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Exception):
            with suppress(TypeError):  # UnicodeDecodeError takes five arguments
                return kind(text)
    return RuntimeError(text)


class _Master:
    """Sends what rank 0 does to all others."""

    def __init__(self, context: Context) -> None:
        self.busy = self._broken = False
        self._context = context
        self._next = 0
        self._dropped: deque[int] = deque()

    def run(self, name: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Do an operation on all ranks."""
        number = self._next
        dropped = list(self._dropped)
        self.send((dropped, name, number, inputs, options))
        self._next += 1
        for _ in dropped:
            self._dropped.popleft()
        try:
            with self.quiet():
                result = _operations[name](*inputs, **options)
        except (PeerLostError, PgasTimeoutError):
            self._broken = True  # who knows what workers are at
            raise
        except Exception as error:
            # What ranks did not do together, a worker may have given up.
            self._settle(number, b"" if isinstance(error, MismatchError) else _described(error))
            self._dropped.append(number)
            raise
        self._settle(number, b"")
        if _is_new(result, self):
            result.label = self, number
            weakref.finalize(result, self._dropped.append, number).atexit = False
        return result

    def _settle(self, number: int, mine: bytes) -> None:
        """Hear how an operation ended on all ranks, and raise what a worker alone raised."""
        try:
            told = _told_by_all(self._context, mine)
        except PgasTimeoutError:
            self._broken = True
            raise
        raised = [] if mine else [_raised(rank, blob) for rank, blob in enumerate(told) if blob]
        if raised:
            self._dropped.append(number)
            # Others run into the end of an operation that a worker gave up: that worker's first.
            raise min(raised, key=lambda error: isinstance(error, MismatchError))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Send nothing that is called inside."""
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def give_up(self, error: BaseException) -> None:
        """Let all workers end that are still there, with PeerLostError if that is why."""
        lost = [str(error), error.rank] if isinstance(error, PeerLostError) else None
        if self._broken and lost is None:
            return  # the failure of this rank ends them
        for rank in range(1, self._context.size):
            self._broken = False
            with suppress(PeerLostError, PgasTimeoutError):
                self.send(lost, [rank])

    def send(self, what: object, ranks: Sequence[int] | None = None) -> None:
        """Send to workers, in messages of the length that there is; None: to all."""
        if self._broken:
            raise PgasTimeoutError(
                "not all workers have had an earlier operation: serve() has to end"
            )
        blob, longest = encode(what, self._name), self._context.limits.passive_bytes - 1
        self._broken = True  # until all have it
        for begin in range(0, len(blob), longest):
            flags = (_FIRST if begin == 0 else 0) | (_MORE if begin + longest < len(blob) else 0)
            message = bytes([flags]) + blob[begin : begin + longest]
            for rank in range(1, self._context.size) if ranks is None else ranks:
                self._context.passive_send(message, rank)
        self._broken = False

    def _name(self, value: Any) -> list[Any] | None:
        """Name what workers have."""
        if isinstance(value, Numbered):
            owner, number = value.label or (None, 0)
            if owner is not self:
                raise LayoutError(f"{value} was not made by the program that runs on a master")
            return ["matrix", number]
        if isinstance(value, Group) and value is not self._context.world:
            raise LayoutError("a master's matrices are of all ranks, not of a group")
        if isinstance(value, Local):
            return ["local"]
        return ["context"] if value is self._context or isinstance(value, Group) else None


class _Worker:
    """Does what the master does, on any other rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._arrays: dict[int, Numbered] = {}

    def work(self) -> None:
        """Work until the master ends."""
        while True:
            blob = self._receive()
            ended = b""
            try:
                message = decode(blob, self._find)
                if not isinstance(message, tuple):
                    break
                self._do(*message)
            except (PeerLostError, PgasTimeoutError):
                raise
            except Exception as error:
                ended = _described(error)
            _told_by_all(self._context, ended)
        if message is not None:
            raise PeerLostError(*message)

    def _do(self, dropped: list[int], name: str, number: int, inputs: Any, options: Any) -> None:
        """Do one operation."""
        for old in dropped:
            self._arrays.pop(old, None)
        result = _operations[name](*inputs, **options)
        if _is_new(result, self):
            result.label = self, number
            self._arrays[number] = result

    def _receive(self) -> bytes:
        blob, more = b"", True
        while more:
            try:
                sender, message = self._context.passive_receive()
            except PgasTimeoutError:
                continue  # the master has something else to do; its end would raise PeerLostError
            if sender != 0:
                raise BufferRefusedError(
                    f"a passive message of rank {sender} to a worker of a master"
                )
            more = bool(message[0] & _MORE)
            blob = (b"" if message[0] & _FIRST else blob) + message[1:]
        return blob

    def _find(self, name: list[Any]) -> Any:
        """Return what the master named."""
        if name[0] == "matrix":
            return self._arrays[name[1]]
        return Local(None) if name[0] == "local" else self._context
