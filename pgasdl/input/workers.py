"""Run a user's decode function, here or in processes that are replaced when they die."""

from __future__ import annotations

import copy
import multiprocessing
import os
import queue
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import numpy.typing as npt

from pgasdl.errors import ClosedError

Decode = Callable[[dict[str, Any], np.random.Generator], Mapping[str, npt.ArrayLike]]
Arrays = dict[str, npt.NDArray[Any]]
Key = tuple[int, int, int]  # seed, iteration, record
_SEEDING = threading.Lock()


class SeededOnUse(np.random.Generator):
    """The generator of a record, which is made when something of it is used for the first time.

    To make one takes longer than to read a small record, and many decoders use none.
    """

    def __new__(cls, key: Key | np.random.BitGenerator) -> Any:
        """Return a generator; a plain one of bits, of which ``spawn`` makes others of its type."""
        if isinstance(key, np.random.BitGenerator):
            return np.random.Generator(key)
        return super().__new__(cls)

    def __init__(self, key: Key) -> None:
        self.__dict__["_key"] = key

    def __getattribute__(self, name: str) -> Any:
        mine = object.__getattribute__(self, "__dict__")
        if "_key" in mine and name != "__dict__":
            with _SEEDING:
                if "_key" in mine:
                    super().__init__(np.random.PCG64(np.random.SeedSequence(mine["_key"])))
                    del mine["_key"]
        return object.__getattribute__(self, name)

    def __reduce__(self) -> Any:
        return np.random.Generator, (self.bit_generator,)


def answer(decode: Decode, record: dict[str, Any], key: Key) -> Arrays | Exception:
    """Return the arrays of a record, or the error that stopped it."""
    try:
        result = decode(record, SeededOnUse(key))
        if not isinstance(result, dict | Mapping) or not result:
            raise TypeError(f"decode gave {result!r:.80}, wanted a dict of arrays")
        return {name: _checked(name, value) for name, value in result.items()}
    except Exception as error:
        return error


def _checked(name: str, value: npt.ArrayLike) -> npt.NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.hasobject or array.nbytes == 0:
        raise TypeError(f"{name!r}: {array.dtype} of shape {array.shape} is no array of numbers")
    return array


class Workers:
    """Processes that decode a record each at a time; threads share them.

    They are new programs, no forks of this process, which has threads and registered memory. Each
    has its own pipe, so one that is killed while it sends stops no other. All end when this process
    does, however it ends. ValueError: ``decode`` cannot be sent to a process.
    """

    def __init__(self, decode: Decode, count: int) -> None:
        try:
            ForkingPickler.dumps(decode)
        except Exception as error:
            raise ValueError(
                f"decode {decode!r} cannot be sent to worker processes ({error}): pass a function "
                "that a module defines, or use threads"
            ) from error
        self._lock = threading.Lock()
        self._all: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self.close = weakref.finalize(self, _kill, self._all, self._lock)
        for _ in range(count):
            self._all.append(_Worker(decode))
            self._idle.put(self._all[-1])

    def answer(self, record: dict[str, Any], key: Key) -> Arrays | Exception:
        """Return what :func:`answer` gives in the next worker that is free.

        ChildProcessError: the worker died, and another one has its place. ClosedError: they were
        closed.
        """
        worker = self._idle.get()
        try:
            return worker.answer(record, key)
        except (EOFError, OSError):
            code = worker.end()
            with self._lock:
                if not self.close.alive:
                    raise ClosedError("the workers are closed") from None
                worker.start()
            how = f"signal {-code}" if code < 0 else f"exit status {code}"
            raise ChildProcessError(f"its worker died ({how})") from None
        finally:
            self._idle.put(worker)


class _Worker:
    """A process, and the pipe to it."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._parent = os.getpid()
        self.start()

    def start(self) -> None:
        # Not a fork server: Python 3.11's finds modules of the working folder first.
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, self._decode), name="pgasdl-decode", daemon=True
        )
        process.start()
        theirs.close()
        self._pipe, self._process = pipe, process

    def answer(self, record: dict[str, Any], key: Key) -> Arrays | Exception:
        self._pipe.send((record, key))
        result: Arrays | Exception = self._pipe.recv()
        return result

    def end(self, patience: float = 5.0) -> int:
        """Give it so many seconds to end, kill it, and return the exit code."""
        self._process.join(patience)
        self._process.kill()
        self._process.join()
        return self._process.exitcode or 0

    @property
    def is_ours(self) -> bool:
        """False in a process that was forked from this one."""
        return os.getpid() == self._parent


def _kill(workers: list[_Worker], lock: threading.Lock) -> None:
    with lock:
        for worker in workers:
            if worker.is_ours:
                worker.end(patience=0)


def _serve(pipe: Connection, decode: Decode) -> None:
    """Decode, in a worker, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when it is over
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, ConnectionError):
        while True:
            result = answer(decode, *pipe.recv())
            try:
                pipe.send(_noted(result) if isinstance(result, Exception) else result)
            except ConnectionError:
                raise
            except Exception:  # an error that cannot be sent
                pipe.send(RuntimeError(f"{type(result).__name__}: {result}"))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # even in the middle of a decode


def _noted(error: Exception) -> Exception:
    """Return a copy with the traceback in its text: where no copy can be made, none can be sent."""
    error.add_note("in a worker:\n" + "".join(traceback.format_exception(error)))
    return copy.copy(error)
