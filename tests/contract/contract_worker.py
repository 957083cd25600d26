"""Runs contract tests inside a worker process: ``contract_worker.py ANSWER_FD SECRET_FD``,
or ``contract_worker.py mpi:SOCKET`` below an MPI's launcher."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, BinaryIO

import pytest

import pgasdl
from pgasdl import loopback

_PR_SET_PDEATHSIG = 1
_MOST_TEXT = 8000


def _program(command: dict[str, Any]) -> Callable[..., Any]:
    folder = command["folder"]
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if command["module"] not in sys.modules:
        importlib.import_module(command["module"])
        gc.freeze()  # what modules hold is no test's: collecting takes 1 ms instead of 60
    program: Callable[..., Any] = getattr(
        sys.modules[command["module"]], command["function"]
    ).program
    return program


def _to_its_end(program: Callable[..., Any], context: Any, command: dict[str, Any]) -> Any:
    result = program(context, **command["parameters"])
    if command["meet"] and not context.closed:
        context.barrier()  # no rank can target one that has left
    return result


def _join(place: dict[str, Any], **settings: Any) -> pgasdl.Context:
    """Call ``init``; skip the test if this machine does not have the transport."""
    try:
        return pgasdl.init(**(place | settings))
    except pgasdl.UnavailableError as error:
        if "is not available" not in str(error):
            raise
        pytest.skip(str(error))


def _as_process(program: Callable[..., Any], command: dict[str, Any], secret_fd: int) -> Any:
    place = command["init"] | {"secret_fd": secret_fd}
    parameters = command["parameters"]
    if command["bare"]:
        join = partial(_join, place)
        join.rank = place["rank"]  # type: ignore[attr-defined]
        return program(join, **parameters)
    with _join(place) as context:
        return _to_its_end(program, context, command)


_subsets: dict[int, Any] = {}


def _of_mpi(size: int) -> Any:
    """The communicator of the first ``size`` ranks; the same one for every test."""
    from pgasdl.runtime.mpi.library import load

    world = load().COMM_WORLD
    if size not in _subsets:
        _subsets[size] = world.Create_group(world.Get_group().Incl(range(size)), size)
    return _subsets[size]


def _as_mpi(program: Callable[..., Any], command: dict[str, Any]) -> Any:
    comm = _of_mpi(command["mpi"])
    place = command["init"] | {"comm": comm}
    if command["bare"]:
        join = partial(_join, place)
        join.rank = comm.rank  # type: ignore[attr-defined]
        return program(join, **command["parameters"])
    with _join(place) as context:
        return _to_its_end(program, context, command)


def _as_threads(program: Callable[..., Any], command: dict[str, Any]) -> list[Any]:
    return loopback.run(
        command["threads"],
        lambda context: _to_its_end(program, context, command),
        **command["settings"],
    )


def _told(error: BaseException, folder: str) -> dict[str, str]:
    """A traceback with the test's variables: pytest rewrites no assertions here."""
    try:
        told = traceback.TracebackException.from_exception(error, capture_locals=True)
    except Exception:  # a repr() failed, of an unfinished object, for example
        told = traceback.TracebackException.from_exception(error)
    for frame in told.stack:
        if not frame.filename.startswith(f"{folder}/test_"):
            frame.locals = None
        elif frame.locals:
            frame.locals = {k: " ".join(v.split())[:200] for k, v in frame.locals.items()}
    text = "".join(told.format())
    if len(text) > _MOST_TEXT:
        text = f"{text[: _MOST_TEXT // 4]}\n[...]\n{text[-3 * _MOST_TEXT // 4 :]}"
    return {"error": text, "kind": type(error).__name__}


def _answer(command: dict[str, Any], secret_fd: int) -> dict[str, Any]:
    on_gpu = contextlib.nullcontext()
    if "gpu" in command:
        from contract_gpu import segments_on_gpu

        on_gpu = segments_on_gpu()
    try:
        with on_gpu:
            return _result(command, secret_fd)
    except pytest.skip.Exception as skipped:
        return {"skip": str(skipped)}
    except BaseException as error:
        return _told(error, command["folder"])


def _result(command: dict[str, Any], secret_fd: int) -> dict[str, Any]:
    program = _program(command)
    if "threads" in command:
        return {"result": _as_threads(program, command)}
    if "mpi" in command:
        return {"result": _as_mpi(program, command)}
    return {"result": _as_process(program, command, secret_fd)}


def _serve(commands: Iterable[bytes], answers: BinaryIO, secret_fd: int) -> None:
    for line in commands:
        answer = _answer(json.loads(line), secret_fd)
        gc.collect()  # frees the test's segments
        sys.stderr.flush()
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _calling_mpi(connection: socket.socket, lines: BinaryIO) -> Iterator[bytes]:
    """Yield lines as they come, and call MPI meanwhile, as a rank of a job does sooner or later:
    MPICH 4.0.2 may keep others in MPI_Win_unlock_all until ranks outside of the window call MPI."""
    from mpi4py import MPI

    while True:
        while not select.select([connection], [], [], 0.01)[0]:
            MPI.COMM_WORLD.Iprobe()
        line = lines.readline()
        if not line:
            return
        yield line


def _serve_over(path: str) -> None:
    """Serve below MPI's launcher, which passes on no descriptors."""
    from pgasdl.runtime.mpi.library import load

    rank = load().COMM_WORLD.rank
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        with connection.makefile("rwb") as lines:
            lines.write(json.dumps({"rank": rank, "pid": os.getpid()}).encode() + b"\n")
            lines.flush()
            _serve(_calling_mpi(connection, lines), lines, -1)


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell sets SIG_IGN
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    if sys.argv[1].startswith("mpi:"):
        _serve_over(sys.argv[1].removeprefix("mpi:"))
        return
    answer_fd, secret_fd = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(answer_fd, False)
    with os.fdopen(answer_fd, "wb") as answers:
        _serve(sys.stdin.buffer, answers, secret_fd)


if __name__ == "__main__":
    main()
