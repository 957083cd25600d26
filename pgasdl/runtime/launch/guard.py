"""Two processes watch a run, so that kill -9 of either leaves nothing behind.

The user starts the first, the guard: it only forwards signals to the second and reaps. The second
is the launcher itself. Both are subreapers: the living one inherits, and kills, the processes that
a rank's children leave behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_SI_KERNEL = 0x80

TOLD = (signal.SIGUSR1, signal.SIGUSR2)  # programs go on after these
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *TOLD)


def forwarded() -> set[signal.Signals]:
    """Return the signals that go to the ranks: not those ignored here, as SIGHUP under nohup."""
    return {number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN}


def guarded(work: Callable[[Callable[[], bool]], int]) -> int:
    """Run ``work`` in a forked process and return its exit status.

    Call it before any thread starts. ``work`` gets a function that says whether this process, its
    guard, is gone. It starts with the signals ``forwarded()`` blocked, and unblocks them when it is
    ready. When the guard dies, ``work`` gets SIGTERM. Afterwards this process has its earlier
    signal mask and children again.
    """
    reaper = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(reaper), 0, 0, 0)
    guard = os.getpid()
    children = frozenset(_children().get(guard, ()))
    signals = {*forwarded(), signal.SIGQUIT, signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        pid = os.fork()
        if pid == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGQUIT, signal.SIGCHLD})
            _work(work, guard)
        status = _watch(pid, signals)
        kill_descendants(spared=children)
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, reaper.value)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if status < 0:
        print(f"pgasdl run: the launcher was killed by {signal_name(-status)}", file=sys.stderr)
    return status if status >= 0 else 128 - status


def _work(work: Callable[[Callable[[], bool]], int], guard: int) -> None:
    status = 1
    try:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == guard:
            status = work(lambda: os.getppid() != guard)
    except BaseException:  # a forked process must not run its parent's code
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _watch(pid: int, signals: set[signal.Signals]) -> int:
    while True:
        info = signal.sigwaitinfo(signals)
        if info.si_signo == signal.SIGCHLD:
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                return os.waitstatus_to_exitcode(status)
        elif info.si_code != _SI_KERNEL:  # the terminal signals the whole group, the launcher too
            os.kill(pid, info.si_signo)


def kill_descendants(spared: Collection[int] = (), seconds: float = 5.0) -> None:
    """SIGKILL and reap the descendants of this process, until none is left.

    Children in ``spared``, and their descendants, stay.
    """
    deadline = time.monotonic() + seconds
    while (pids := _descendants(spared)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)


def _descendants(spared: Collection[int]) -> list[int]:
    children = _children()
    found: list[int] = []
    todo = [os.getpid()]
    while todo:
        below = [pid for pid in children.get(todo.pop(), ()) if pid not in spared]
        found += below
        todo += below
    return found


def _children() -> dict[int, list[int]]:
    """Return the children of every process of this machine."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{entry}/stat", "rb") as file:
                    # The command's name may itself hold ")" and spaces.
                    fields = re.sub(rb"^.*\)", b"", file.read(), flags=re.DOTALL).split()
                children.setdefault(int(fields[1]), []).append(int(entry))
    return children


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9; real-time signals have only a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(f"prctl({option}) is refused here")
