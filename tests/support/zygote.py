"""Starts ranks by fork from a process that has imported everything: a start costs milliseconds.

``zygote.py SOCKET MODULE...`` imports the modules, none of which may start a thread. The socket
delivers one datagram per rank: JSON with the program, its arguments and environment, and two
descriptors, the rank's output and the job's secret. The answers are ``{"pid": ...}`` and, when a
rank ended, ``{"pid": ..., "status": ...}``. When the socket closes, all processes end.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


def serve(sock: socket.socket) -> dict[str, Any] | None:
    """Fork and reap until the socket closes; in a forked rank, return what it is to run."""
    wake, waker = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        readable, _, _ = select.select([sock, wake], [], [])
        if wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    status = os.waitstatus_to_exitcode(ended[1])
                    sock.send(json.dumps({"pid": ended[0], "status": status}).encode())
        if sock not in readable:
            continue
        message, descriptors, _, _ = socket.recv_fds(sock, 1 << 20, 2)
        if not message:
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            os.close(wake)
            os.close(waker)
            return become(json.loads(message), descriptors, sock)
        for descriptor in descriptors:
            os.close(descriptor)
        sock.send(json.dumps({"pid": pid}).encode())


def become(order: dict[str, Any], descriptors: list[int], sock: socket.socket) -> dict[str, Any]:
    """Make this forked process look like one that `pgasdl run` started."""
    parent = os.getppid()
    sock.close()
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(137)
    output, secret = descriptors
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for descriptor in (null, output):
        os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(order["environ"])
    if "PGASDL_STORE" in os.environ:
        os.environ["PGASDL_SECRET_FD"] = str(secret)
    sys.argv = [order["program"], *order["arguments"]]
    sys.path[:1] = [os.path.dirname(order["program"]), *order["folders"]]
    return order


if __name__ == "__main__":
    for _name in sys.argv[2:]:
        importlib.import_module(_name)
    gc.freeze()  # forked ranks share what modules hold
    _order = serve(socket.socket(fileno=int(sys.argv[1])))
    if _order is not None:
        runpy.run_path(_order["program"], run_name="__main__")
