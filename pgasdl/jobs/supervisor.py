"""``python -m pgasdl.jobs.supervisor STEP [LOCK]``: runs one program, and writes down how it ended.

It belongs to no terminal and outlives the server. STEP is a folder with the command. A signal asks
it to stop. On the server's machine LOCK is the number of an inherited descriptor that holds the
step's lock, and standard input is a pipe through which the server asks the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pgasdl.runtime.launch import shim
from pgasdl.runtime.launch.guard import kill_descendants

# Files of a step's folder. At the end BEGUN is renamed to OUTCOME.
COMMAND, LOCK, CONTROL, MESSAGES = "command.json", "lock", "control", "messages"
BEGUN, OUTCOME = "outcome.begun", "outcome.json"

_KILL_AFTER = 2.0  # seconds that the launcher gets beyond the grace of its ranks
_TAIL = 16 << 10  # bytes of its output, in which to find why it failed
_TOLD = re.compile(r"pgasdl run: rank (\d+) \(process \d+\) (was killed|ended with \d+:)?")
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """One program: its output, its end."""

    def __init__(self, step: Path, lock: int | None) -> None:
        self._step = step
        self._lock = lock
        self._begun = os.open(step / BEGUN, os.O_WRONLY)
        self._command: dict[str, Any] = json.loads((step / COMMAND).read_bytes())
        self._log = -1
        self._tail = b""
        self._child: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._stopped = False
        self._kill_at: float | None = None
        self._reason = ""

    def run(self) -> None:
        """Run the program to its end, and write the outcome."""
        for number in _SIGNALS:
            signal.signal(number, lambda *_: self._stop())
        # A process that loses its parent becomes our child, also if the launcher is killed.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            self._log = os.open(self._command["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            self._child = self._start()
            if self._stopped:  # before there was anything to end
                self._end()
            status = self._follow(self._child)
        except (OSError, ValueError) as error:
            status, self._reason = None, f"cannot be started: {error}"
        finally:
            kill_descendants()  # left by the program; or all, if this process fails
        self._write(status)

    def _start(self) -> subprocess.Popen[bytes]:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        wake, waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        # The shim ties it to us: if we are killed, it is, and the launcher ends all ranks.
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", shim.__file__, str(os.getpid()), *self._command["words"]],
            env=os.environ | self._command["environment"],
            cwd=self._command["folder"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=() if self._lock is None else (self._lock,),
            start_new_session=True,
        )
        assert child.stdout is not None
        self._output = child.stdout.fileno()
        os.set_blocking(self._output, False)
        self._selector.register(self._output, selectors.EVENT_READ, self._read)
        self._selector.register(wake, selectors.EVENT_READ, lambda: _drain(wake))
        if self._lock is not None:
            self._selector.register(0, selectors.EVENT_READ, self._listen)
        return child

    def _follow(self, child: subprocess.Popen[bytes]) -> int:
        while child.poll() is None:
            limit = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            for key, _ in self._selector.select(limit):
                key.data()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_at = None
                child.kill()
        while self._read():
            pass
        assert child.returncode is not None
        return child.returncode if child.returncode >= 0 else 128 - child.returncode

    def _listen(self) -> None:
        if _drain(0):
            self._stop()

    def _stop(self) -> None:
        """Pass on SIGTERM once; later requests change nothing."""
        self._stopped = True
        self._end()

    def _end(self) -> None:
        if self._kill_at is None and self._child is not None and self._child.poll() is None:
            self._kill_at = time.monotonic() + self._command["grace"] + _KILL_AFTER
            if words := self._command["stop"]:
                subprocess.Popen(words, stdin=subprocess.DEVNULL)
            else:
                self._child.terminate()

    def _read(self) -> bool:
        """Copy the program's output to the log; False: there is no more at present."""
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._output)
            return False
        self._tail = (self._tail + data)[-_TAIL:]
        while data and not self._reason:
            try:
                data = data[os.write(self._log, data) :]
            except OSError as error:
                # On a full disk the program could not go on either; its output is dropped.
                self._reason = f"the log cannot be written: {error.strerror}"
                self._end()
        return True

    def _write(self, status: int | None) -> None:
        """Write the outcome into the space that was set aside; it is there whole, or not at all."""
        outcome = {
            "kind": self._command["kind"],
            "status": status,
            "stopped": self._stopped,
            "reason": self._reason,
            "ended": time.time(),
            "last": _last(self._tail) if status else "",
        }
        if not os.fstat(self._begun).st_nlink:  # somebody removed the folder
            self._step.mkdir(0o700, parents=True, exist_ok=True)
            self._begun = os.open(self._step / BEGUN, os.O_CREAT | os.O_WRONLY, 0o600)
        length = os.pwrite(self._begun, json.dumps(outcome).encode(), 0)
        os.ftruncate(self._begun, length)
        os.fsync(self._begun)
        os.rename(self._step / BEGUN, self._step / OUTCOME)


def _last(output: bytes) -> str:
    """Return the last line, or the launcher's about a rank; if that has no reason, the rank's too.

    Control characters, which a terminal would obey, are question marks.
    """
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    last = lines[-1:]
    for at, line in enumerate(lines):
        if told := _TOLD.match(line):
            own = [each for each in lines[:at] if each.startswith(f"[{told[1]}] ")]
            last = [line] if told[2] else [*own[-1:], line]
    words = "; ".join(line[:200] for line in last)
    return "".join(each if each.isprintable() else "?" for each in words)


def _drain(descriptor: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(descriptor, 4096)
    return b""


if __name__ == "__main__":
    Supervisor(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None).run()
