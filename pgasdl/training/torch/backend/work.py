"""What calls of torch.distributed return, and the thread that makes collectives in order."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import Tensor, distributed
from torch.distributed.distributed_c10d import Work as BaseWork
from torch.futures import Future

from pgasdl.errors import PgasError, Timeout
from pgasdl.training.torch.backend.message import Message
from pgasdl.training.torch.backend.messages import Messages

Result = list[Tensor]
_LOOK = 0.05  # at a thread that is to end, seconds


def as_torch(error: BaseException) -> BaseException:
    """Return what programs written for torch.distributed expect instead of our errors."""
    if not isinstance(error, PgasError):
        return error
    what = "Timed out waiting" if isinstance(error, Timeout) else type(error).__name__
    known = distributed.DistBackendError(f"pgasdl: {what}: {error}")
    known.__cause__ = error
    return known


@contextmanager
def torch_errors() -> Iterator[None]:
    """Raise what programs for torch.distributed expect instead of our errors."""
    try:
        yield
    except PgasError as error:
        raise as_torch(error) from error


def seconds_of(timeout: timedelta | None, default: float) -> float:
    """Return seconds; unset or no timeout: ``default``."""
    if timeout is None or timeout <= timedelta(0):
        return default
    return timeout.total_seconds()


class Work(BaseWork):
    """A collective or a message that was begun.

    Parameters
    ----------
    result : list[Tensor]
        Tensors that hold the result when it is done.
    """

    def __init__(self, result: Result) -> None:
        super().__init__()
        self._result = result
        self._changed = threading.Condition()
        self._done = False
        self._error: BaseException | None = None
        self._future: Future[Result] | None = None

    # --- who makes it

    def end(self, error: BaseException | None = None) -> None:
        """Note that it is over; with an error, that it failed."""
        with self._changed:
            if self._done:
                return
            self._error = None if error is None else as_torch(error)
            self._done = True
            self._changed.notify_all()
            future = self._future
        if future is not None:
            self._resolve(future)

    def _resolve(self, future: Future[Result]) -> None:
        if self._error is None:
            future.set_result(self._result)
        else:
            future.set_exception(self._error)  # type: ignore[arg-type]

    # --- who waits for it

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait; raise what made it fail."""
        limit = seconds_of(timeout, 0.0) or None
        with self._changed:
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
        with self._changed:
            if self._future is not None:
                return self._future
            future = self._future = Future()
            done = self._done
        if done:
            self._resolve(future)
        return future


class MessageWork(Work):
    """A message that was begun.

    Parameters
    ----------
    result : list[Tensor]
        The tensor that is sent or received.
    messages : Messages
        Where it was begun.
    message : Message
        What was begun.
    seconds : float
        How long a wait takes at most, by default.
    """

    def __init__(
        self, result: Result, messages: Messages, message: Message, seconds: float
    ) -> None:
        super().__init__(result)
        self._messages, self._message, self._seconds = messages, message, seconds
        messages.when_over(message, lambda: self.end(message.error))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait; raise what made it fail."""
        try:
            self._messages.wait(self._message, seconds_of(timeout, self._seconds))
        except PgasError as error:
            if not self._message.over:
                self._messages.cancel(self._message)
            raise as_torch(error) from error
        return super().wait(timeout)

    def source_rank(self) -> int:
        """Return who sent it, as a place in the group."""
        self.wait()
        assert self._message.peer is not None
        return self._message.peer

    _source_rank = source_rank


class Together(Work):
    """Several of them, as one."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__([tensor for work in works for tensor in work._result])
        self._works = works
        self._n_left = len(works)
        for work in works:
            work.get_future().add_done_callback(self._one_ended)
        if not works:
            self.end()

    def _one_ended(self, future: Future[Result]) -> None:
        with self._changed:
            self._n_left -= 1
            last = self._n_left == 0
        if last:
            errors = [work._error for work in self._works if work._error is not None]
            self.end(errors[0] if errors else None)


class Calls:
    """Makes calls one after the other: at once if the caller waits anyway, else in a thread."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Work, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._name = name
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._n_queued = 0
        self._running = threading.Lock()
        self._failed: BaseException | None = None
        self._calling = False

    def run(self, work: Work, call: Callable[[], Any], *, later: bool) -> Work:
        """Make ``call``; ``work`` ends with it."""
        with self._lock:
            at_once = not later and self._n_queued == 0 and self._running.acquire(blocking=False)
            if not at_once:
                self._n_queued += 1
                self._queue.put((work, call))
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._serve, name=self._name, daemon=True
                    )
                    self._thread.start()
        if at_once:
            try:
                self._make(work, call)
            finally:
                self._running.release()
        return work

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            with self._running:
                self._make(*item)
            with self._lock:
                self._n_queued -= 1

    def _make(self, work: Work, call: Callable[[], Any]) -> None:
        if self._failed is not None:  # half done, maybe, on a peer
            work.end(self._failed)
            return
        error = self._outcome(call)
        work.end(error)
        if error is not None and not isinstance(error, Exception):
            raise error

    def _outcome(self, call: Callable[[], Any]) -> BaseException | None:
        """Make a call; return how it failed."""
        self._calling = True
        try:
            call()
        except BaseException as error:
            if not isinstance(error, (ValueError, TypeError)) or isinstance(error, PgasError):
                self._failed = error
            return error
        finally:
            self._calling = False
        return None

    def fail(self, error: BaseException) -> None:
        """Refuse every later call with ``error``."""
        self._failed = self._failed or error

    def close(self, seconds: float = math.inf) -> None:
        """End the thread, after what it has begun; leave it where a call takes ``seconds``."""
        self._queue.put(None)
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        deadline = time.monotonic() + seconds
        while thread.is_alive() and not (self._calling and time.monotonic() > deadline):
            thread.join(_LOOK)
