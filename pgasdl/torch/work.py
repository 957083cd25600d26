"""The objects that calls of torch.distributed return."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import Tensor, distributed
from torch.distributed.distributed_c10d import Work as BaseWork
from torch.futures import Future

from pgasdl.errors import PgasError, PgasTimeoutError
from pgasdl.torch.untraced import Untraced

Result = list[Tensor]
_NONE = timedelta(0)


def as_torch(error: BaseException) -> BaseException:
    """Return the error that programs for torch.distributed expect instead of ours."""
    if not isinstance(error, PgasError):
        return error
    what = "Timed out waiting" if isinstance(error, PgasTimeoutError) else type(error).__name__
    known = distributed.DistBackendError(f"pgasdl: {what}: {error}")
    known.__cause__ = error
    return known


@contextmanager
def torch_errors() -> Iterator[None]:
    """Raise the errors that programs for torch.distributed expect instead of ours."""
    try:
        yield
    except PgasError as error:
        raise as_torch(error) from error


def seconds_of(timeout: timedelta | None, default: float) -> float:
    """Return seconds; unset or no timeout: ``default``."""
    if timeout is None or timeout <= _NONE:
        return default
    return timeout.total_seconds()


class Promise:
    """The end of a call that a program sees as a future.

    C++ takes what ``Future.set_exception`` sets for the value: DistributedDataParallel then looks
    for tensors in an exception, and crashes. If a callback raises, C++ and Python both get an
    error. So ``future``, which the program gets, is made by a callback of ``ended``; a wait for a
    failed one raises a RuntimeError that says why.
    """

    def __init__(self, ended: Future[Any]) -> None:
        self._ended = ended
        self.future: Future[Any] = ended.then(_value_of)

    def settle(self, value: Any) -> None:
        """Complete the future; with an exception: let it fail. That runs its callbacks."""
        self._ended.set_result(value)


def _value_of(ended: Future[Any]) -> Any:
    value = ended.value()
    if isinstance(value, BaseException):
        raise value
    return value


class GroupWork(Untraced, BaseWork):
    """A collective or a message that was begun; ``result`` has the tensors of its result."""

    # One for all works: few are awaited at a time, and making a lock for each would take longer.
    _lock = threading.RLock()
    _changed = threading.Condition(_lock)
    _done = False
    _error: BaseException | None = None
    _promise: Promise | None = None

    def __init__(self, result: Result) -> None:
        super().__init__()
        self._result = result

    # --- for the thread that makes it

    def end(self, error: BaseException | None = None) -> bool:
        """Note that it is over; with an error, that it failed.

        Return whether it has a future, which :meth:`complete` has to complete.
        """
        with self._lock:
            if self._done:
                return False
            self.end_unseen(error)
            self._changed.notify_all()
            return self._promise is not None

    def end_unseen(self, error: BaseException | None = None) -> None:
        """Note the same, where no other thread has the work yet."""
        if error is not None:
            self._error = as_torch(error)
        self._done = True

    def complete(self) -> None:
        """Complete the future, once it is over: that runs its callbacks, the program's code."""
        assert self._promise is not None
        self._promise.settle(self._result if self._error is None else self._error)

    # --- for callers that wait for it

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait; raise what made it fail."""
        if not self._done:
            limit = seconds_of(timeout, 0.0) or None
            with self._lock:
                if not self._changed.wait_for(lambda: self._done, limit):
                    raise distributed.DistBackendError(
                        f"Timed out: it was not complete within {limit:g} s"
                    )
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._done

    def is_success(self) -> bool:
        """Whether it is over and did not fail."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """Return what made it fail."""
        return self._error

    def result(self) -> Result:
        """Return the tensors of the result."""
        self.wait()
        return self._result

    def synchronize(self) -> None:
        """Wait; raise what made it fail."""
        self.wait()

    def get_future(self) -> Future[Result]:
        """Return a future of the result's tensors."""
        with self._lock:
            if self._promise is not None:
                return self._promise.future
            promise = self._promise = Promise(Future())
            done = self._done
        if done:
            self.complete()
        return promise.future
