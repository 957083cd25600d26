"""The threads that make collectives in their order, and run the callbacks of futures."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pgasdl.errors import ClosedError
from pgasdl.torch.work import GroupWork

_LOOK = 0.05  # seconds between two looks at a thread that has to end


class WorkQueue:
    """Makes calls one after the other: at once if the caller waits anyway, else in a thread.

    A thread that completes a future runs its callbacks, which are the program's and may wait for
    other calls. So there is always one more thread than are in callbacks, to make those calls.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # a handler of a signal may come in
        self._changed = threading.Condition(self._lock)
        self._queued: deque[tuple[GroupWork, Callable[[], Any]]] = deque()
        self._over: deque[GroupWork] = deque()  # their futures are to be completed
        self._making = False
        self._maker: threading.Thread | None = None
        self._threads: list[threading.Thread] = []
        self._n_free = 0  # threads that take what comes
        self._failed: Exception | None = None
        self._closed = False

    def run(self, work: GroupWork, call: Callable[[], Any], *, later: bool) -> GroupWork:
        """Make ``call``; ``work``, which nobody has yet, ends with it."""
        with self._lock:
            failed = self._failed
            at_once = not (failed or later or self._making or self._queued)
            if at_once:
                self._making = True
            elif failed is None:
                self._queued.append((work, call))
                self._want_thread()
        if failed is not None:
            work.end_unseen(failed)
        elif at_once:
            error = self._outcome(call)
            with self._lock:
                self._making = False
                if self._queued or self._over:
                    self._want_thread()
            work.end_unseen(error)
            if error is not None and not isinstance(error, Exception):
                raise error
        return work

    def complete(self, work: GroupWork) -> None:
        """Complete the future of a work that is over, in a thread that callbacks may block."""
        with self._lock:
            self._over.append(work)
            self._want_thread()

    @property
    def whole(self) -> bool:
        """Whether every call was made."""
        with self._lock:
            return not (self._failed or self._making or self._queued)

    def fail(self, error: Exception) -> None:
        """Refuse every later call with ``error``."""
        self._failed = self._failed or error

    def close(self, call_seconds: float, seconds: float) -> None:
        """End the threads, after what they have begun, once no call is made any more.

        A thread that takes ``call_seconds`` more for a call, or ``seconds`` for callbacks, is left.
        """
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            threads = [each for each in self._threads if each is not threading.current_thread()]
        began = time.monotonic()
        for thread in threads:
            while thread.is_alive():
                limit = call_seconds if thread is self._maker else seconds
                if time.monotonic() - began >= limit:
                    break
                thread.join(_LOOK)

    # --- with the lock held

    def _idle(self) -> bool:
        return not self._over and (self._making or not self._queued)

    def _want_thread(self) -> None:
        """Wake a thread for the work that there is, or start one."""
        if self._idle():
            return
        if self._n_free:
            self._changed.notify()
            return
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self._threads.append(thread)
        self._n_free += 1
        thread.start()

    # --- in the threads

    def _serve(self) -> None:
        while (item := self._next()) is not None:
            self._do(*item)
            del item  # it holds the program's tensors

    def _do(self, work: GroupWork, call: Callable[[], Any] | None) -> None:
        if call is None or self._made(work, call):
            work.complete()
            with self._lock:
                self._n_free += 1

    def _next(self) -> tuple[GroupWork, Callable[[], Any] | None] | None:
        """Return a call to be made, or a work whose future is to be completed."""
        with self._lock:
            while self._idle():
                if self._closed and not self._queued:
                    self._n_free -= 1
                    return None
                self._changed.wait()
            self._n_free -= 1
            if self._over:
                item = self._over.popleft(), None
                self._want_thread()
                return item
            self._making, self._maker = True, threading.current_thread()
            return self._queued.popleft()

    def _made(self, work: GroupWork, call: Callable[[], Any]) -> bool:
        """Make a call; return whether there is a future to be completed."""
        error = self._outcome(call)
        with self._lock:
            self._making, self._maker = False, None
            if not work.end(error):
                self._n_free += 1
                return False
            self._want_thread()
            return True

    def _outcome(self, call: Callable[[], Any]) -> BaseException | None:
        """Make a call, unless one failed before; return how it failed."""
        if self._failed is not None:  # a peer may have done half of the failed call
            return self._failed
        try:
            call()
        except BaseException as error:
            what = f"a collective was interrupted by {type(error).__name__}"
            self._failed = error if isinstance(error, Exception) else ClosedError(what)
            return error
        return None
