"""Threads that call functions; some do not keep the process when a call hangs."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
_AT_ONCE = 16  # calls, which mostly wait for storage
_PATIENCE = 1.0  # seconds at the end of the process
_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Threads:
    """Some threads, which end when no reference to this is left, or with the process.

    At its end Python waits for ever for the threads of a ThreadPoolExecutor.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        threads = [
            threading.Thread(target=_serve, args=(self._calls,), name=f"{name}_{k}", daemon=True)
            for k in range(count)
        ]
        for thread in threads:
            thread.start()
        self._threads = threads
        self.close = weakref.finalize(self, _end, self._calls, threads)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call a function in the next thread that is free."""
        future: Future[Any] = Future()
        self._calls.put((future, function, args))
        return future

    def join(self) -> None:
        """Close, and wait for the calls."""
        self.close()
        for thread in self._threads:
            thread.join()


def _serve(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        future, function, args = call
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
        del call, future, function, args  # they may hold the threads' owner


def _end(calls: _Calls, threads: list[threading.Thread]) -> None:
    """Let the threads end when they have done what is under way."""
    for _ in threads:
        calls.put(None)
    if not threading.main_thread().is_alive():  # Python ends: they should not be within a library
        deadline = time.monotonic() + _PATIENCE
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))


def at_once(call: Callable[[_In], _Out], items: Sequence[_In]) -> list[_Out]:
    """Call for several items at once; the first error ends it, and no call is waited for."""
    if len(items) < 2:
        return [call(item) for item in items]
    threads = Threads(min(_AT_ONCE, len(items)), "pgasdl-storage")
    futures = [threads.submit(call, item) for item in items]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        threads.close()
