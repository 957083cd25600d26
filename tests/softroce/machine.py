"""One guest as a process of the host: starts it, follows it, and ends it whatever happens."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import kernel

TIMED_OUT = 124  # as the command `timeout` returns it
VANISHED = 125

_HERE = Path(__file__).resolve().parent
_PIPES = ("output", "report", "console")
_LAST_WORDS = 2.0  # seconds to read what the pipes still hold after a kernel has ended
_CONSOLE_LINES = 12


@dataclass(frozen=True)
class Result:
    """The result of one guest: the command's status and output, and the kernel's own messages."""

    guest: int
    status: int
    output: str
    console: str
    seconds: float

    @property
    def timed_out(self) -> bool:
        return self.status == TIMED_OUT

    def last_words(self) -> str:
        """The end of the console, where a guest that gave no status may say why."""
        return "\n".join(self.console.splitlines()[-_CONSOLE_LINES:])

    def check(self) -> Result:
        """Return itself if the command succeeded; else raise AssertionError with all details."""
        if self.status != 0:
            told = [f"guest {self.guest}: status {self.status} after {self.seconds:.1f} s"]
            if self.status == TIMED_OUT:
                told[0] += ", out of time"
            told.append(self.output)
            if self.status in (TIMED_OUT, VANISHED):
                told += ["--- console of the guest", self.last_words()]
            raise AssertionError("\n".join(told))
        return self


class Machine:
    """The description of a guest, which runs from `start` to `close`."""

    def __init__(
        self,
        number: int,
        job: str,
        settings: str,
        *,
        memory: int,
        cpus: int,
        cable: int | None = None,
        hold: int = 0,
    ) -> None:
        self.number = number
        self._files = {"job": job, "settings": settings}
        self._memory = memory
        self._cpus = cpus
        self._cable = cable
        self._hold = hold
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""
        self._began = 0.0
        self._ended = 0.0
        self._late = False
        self.pipes: dict[str, int] = {}
        self.heard = {name: bytearray() for name in _PIPES}

    def start(self) -> None:
        """Boot. The guest's files lie in a folder that is removed once the guest has read them."""
        self._began = time.monotonic()
        self._folder = tempfile.mkdtemp(prefix="pgasdl-guest-")
        for name, text in self._files.items():
            Path(self._folder, name).write_text(text)
        for name in ("init.sh", "device.sh"):
            shutil.copy(_HERE / name, self._folder)
        Path(self._folder, "init.sh").chmod(0o755)
        if self._hold:
            compiler = ["cc", "-O1", "-o", f"{self._folder}/hold", str(_HERE / "hold.c")]
            subprocess.run(compiler, check=True)
        writers: dict[str, int] = {}
        try:
            for name in _PIPES:
                self.pipes[name], writers[name] = os.pipe()
                os.set_blocking(self.pipes[name], False)
            inherited = list(writers.values()) + ([] if self._cable is None else [self._cable])
            self._process = subprocess.Popen(
                self._command_line(writers),
                stdin=subprocess.DEVNULL,
                stdout=writers["console"],
                stderr=subprocess.STDOUT,
                cwd="/",
                env={"TMPDIR": _memory_folder(self._memory), "PATH": "/usr/bin:/bin"},
                pass_fds=inherited,
                start_new_session=True,
            )
        finally:
            for writer in writers.values():
                os.close(writer)

    def _command_line(self, writers: dict[str, int]) -> list[str]:
        line = [
            # The kernel dies with the thread that started it, and no core file is written.
            *("prlimit", "--core=0", "setpriv", "--pdeathsig", "KILL"),
            *([f"{self._folder}/hold", str(self._hold)] if self._hold else []),
            str(kernel.path()),
            *("rootfstype=hostfs", "rootflags=/", "ro", f"init={self._folder}/init.sh"),
            *(f"mem={self._memory >> 20}M", "seccomp=on", f"ncpus={self._cpus}"),
            *(f"umid=guest{self.number}", f"uml_dir={self._folder}/"),
            *("con=null", "con0=null,fd:1", "ssl=null"),
            *(f"ssl0=null,fd:{writers['output']}", f"ssl1=null,fd:{writers['report']}"),
            *("rcupdate.rcu_expedited=1", f"softroce={self._folder}"),
        ]
        if self._cable is not None:
            line.append(
                f"vec0:transport=fd,fd={self._cable},depth=128,mtu=4200,"
                f"mac=02:00:00:77:02:{self.number:02x}"
            )
        return line

    def hear(self, name: str, data: bytes) -> None:
        self.heard[name] += data
        if name == "report" and self._folder:
            self._remove_folder()

    def ended(self) -> bool:
        """Whether the kernel's process has ended, and its last output is read or overdue."""
        assert self._process is not None
        if self._process.poll() is None:
            return False
        self._ended = self._ended or time.monotonic()
        return not self.pipes or time.monotonic() - self._ended > _LAST_WORDS

    def drop(self, name: str) -> None:
        os.close(self.pipes.pop(name))

    def kill(self, *, late: bool = False) -> None:
        """End the kernel, and with it all processes inside, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._late |= late
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Leave nothing behind; a second call is harmless."""
        self.kill()
        self._ended = self._ended or time.monotonic()
        for name in list(self.pipes):
            self.drop(name)
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""

    def result(self) -> Result:
        status = TIMED_OUT if self._late else VANISHED
        for line in self.heard["report"].decode().splitlines():
            word, _, value = line.partition(" ")
            if word == "status":
                status = int(value)
        output, console = (self.heard[n].decode(errors="replace") for n in ("output", "console"))
        return Result(self.number, status, output, console, self._ended - self._began)


def attend(
    machines: Sequence[Machine],
    timeout: float,
    on_output: Callable[[int, bytes], None] | None = None,
) -> list[Result]:
    """Start the machines and follow them to their end, or for ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    try:
        with selectors.DefaultSelector() as selector:
            for machine in machines:
                machine.start()
                for name, pipe in machine.pipes.items():
                    selector.register(pipe, selectors.EVENT_READ, (machine, name))
            while not all([machine.ended() for machine in machines]):
                if time.monotonic() > deadline:
                    for machine in machines:
                        machine.kill(late=True)
                _listen(selector, on_output)
    finally:
        for machine in machines:
            machine.close()
    return [machine.result() for machine in machines]


def _listen(
    selector: selectors.BaseSelector, on_output: Callable[[int, bytes], None] | None
) -> None:
    """Read what the guests write within a moment."""
    for key, _ in selector.select(0.1):
        machine, name = key.data
        data = os.read(key.fd, 1 << 16)
        if data:
            machine.hear(name, data)
            if name == "output" and on_output is not None:
                on_output(machine.number, data)
        else:
            selector.unregister(key.fd)
            machine.drop(name)


def _memory_folder(n_bytes: int) -> str:
    """Where the kernel keeps the guest's memory, in a file without a name."""
    for folder in ("/dev/shm", "/tmp", "/var/tmp"):
        space = os.statvfs(folder)
        if space.f_bavail * space.f_frsize >= n_bytes:
            return folder
    raise OSError(f"no room for {n_bytes >> 20} MiB in /dev/shm, /tmp or /var/tmp")
