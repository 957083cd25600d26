"""Jobs whose ranks are killed, stopped and interrupted, with a deadline over everything they do.

A :class:`Job` serves the store itself, as a launcher does, but ends nobody: what the survivors do
is what is tested. Programs print one JSON object a line. Whatever a test does, `close` kills every
process group that is left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pgasdl.config
from pgasdl.runtime.bootstrap import StoreServer

PROGRAMS = Path(__file__).with_name("programs")
_ZYGOTE = str(Path(__file__).with_name("failure_zygote.py"))
PLACE = str(Path(pgasdl.config.__file__).parents[1])
_FOREIGN = ("PGASDL_", "PMI", "OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC", "MPI_LOCAL")
# Bounds that only a hang exceeds, on a machine that others load as well.
PATIENCE = 30.0

Event = dict[str, Any]


class HungError(AssertionError):
    """Something did not happen in time; the text holds what every rank had printed."""


def environment(**variables: str) -> dict[str, str]:
    """This process's without any launcher's traces, and without thread pools in the ranks."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    place = {"PYTHONPATH": PLACE, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return kept | place | {"PGASDL_LOG": "warning"} | variables


def alive(pid: int) -> bool:
    """Whether the process runs: a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] not in "ZX"


def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Wait for a condition; False if it did not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class Zygote:
    """The process that forks ranks; see failure_zygote.py."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, _ZYGOTE, str(theirs.fileno())],
                env=environment(),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.statuses: dict[int, int] = {}

    def start(self, order: dict[str, Any], descriptors: list[int]) -> int:
        socket.send_fds(self.sock, [json.dumps(order).encode()], descriptors)
        while (answer := self._take(PATIENCE)) is not None:
            if "status" not in answer:
                return int(answer["pid"])
        raise HungError("the zygote does not answer")

    def pump(self) -> None:
        """Take notice of the ranks that ended."""
        while self._take(0) is not None:
            pass

    def _take(self, seconds: float) -> Event | None:
        self.sock.settimeout(seconds)
        try:
            data = self.sock.recv(4096)
        except (BlockingIOError, TimeoutError):
            return None
        if not data:
            raise HungError("the zygote is gone")
        answer: Event = json.loads(data)
        if "status" in answer:
            self.statuses[answer["pid"]] = answer["status"]
        return answer

    def close(self) -> None:
        self.sock.close()
        self.process.kill()
        self.process.wait()


@dataclass
class Rank:
    """One process of a job and what it has said."""

    rank: int
    pid: int
    output: int
    status: int | None = None
    events: list[Event] = field(default_factory=list)
    text: list[str] = field(default_factory=list)  # lines that are no JSON
    partial: bytes = b""

    def said(self, what: str) -> list[Event]:
        return [event for event in self.events if event.get("event") == what]


class Job:
    """``n`` ranks of a program.

    Parameters
    ----------
    program : file name in programs/, or the text of a program
    arguments : the program's
    variables : of the ranks' environment
    ranks : those to start now, None: all
    """

    def __init__(
        self,
        zygote: Zygote,
        program: str,
        n: int,
        *arguments: object,
        ranks: list[int] | None = None,
        **variables: str,
    ) -> None:
        self._zygote = zygote
        self._program = str(PROGRAMS / program)
        self._arguments = [str(argument) for argument in arguments]
        secret = secrets.token_bytes(32)
        self.n = n
        self.job_id = secrets.token_hex(4)
        self.server = StoreServer(secret, n, job_id=self.job_id)
        self._secret = os.memfd_create("secret", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(self._secret, secret)
        fcntl.fcntl(self._secret, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK)
        self._selector = selectors.DefaultSelector()
        self._variables = variables
        self.ranks: dict[int, Rank] = {}
        for rank in range(n) if ranks is None else ranks:
            self.start(rank)

    def start(self, rank: int) -> Rank:
        host, port = self.server.address
        place = {
            "PGASDL_RANK": str(rank),
            "PGASDL_SIZE": str(self.n),
            "PGASDL_LOCAL_RANK": str(rank),
            "PGASDL_LOCAL_SIZE": str(self.n),
            "PGASDL_JOB_ID": self.job_id,
            "PGASDL_STORE": f"{host}:{port}",
        }
        ours, theirs = os.pipe()
        order = {
            "program": self._program,
            "arguments": self._arguments,
            "environ": environment(**place, **self._variables),
        }
        pid = self._zygote.start(order, [theirs, self._secret])
        os.close(theirs)
        os.set_blocking(ours, False)
        self.ranks[rank] = Rank(rank, pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, self.ranks[rank])
        return self.ranks[rank]

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def pump(self, seconds: float = 0.0) -> None:
        """Read what the ranks wrote, waiting at most so long for something."""
        for key, _ in self._selector.select(seconds):
            rank: Rank = key.data
            data = os.read(rank.output, 1 << 16)
            if not data:
                self._selector.unregister(rank.output)
                continue
            *lines, rank.partial = (rank.partial + data).split(b"\n")
            for line in lines:
                try:
                    event = json.loads(line)
                    rank.events.append(event if isinstance(event, dict) else {"event": event})
                except ValueError:
                    rank.text.append(line.decode(errors="replace"))
        self._zygote.pump()
        for rank in self.ranks.values():
            rank.status = self._zygote.statuses.get(rank.pid, rank.status)

    def until(self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
        """Read on until the condition holds."""
        deadline = time.monotonic() + seconds
        while True:
            self.pump(0.02)
            if condition():
                return
            if time.monotonic() > deadline:
                raise HungError(f"after {seconds} s still not: {what}\n{self.transcript()}")

    def said(self, what: str, ranks: list[int] | None = None, seconds: float = PATIENCE) -> None:
        """Wait until these ranks (None: all) have said it; an early end is a failure at once."""
        wanted = [self.ranks[rank] for rank in (self.ranks if ranks is None else ranks)]

        def all_said() -> bool:
            missing = [rank for rank in wanted if not rank.said(what)]
            if any(rank.status is not None for rank in missing):
                self.pump(0.02)
                gone = [rank.rank for rank in wanted if not rank.said(what)]
                assert not gone, f"ranks {gone} ended without {what!r}\n{self.transcript()}"
            return not missing

        self.until(all_said, f"{what!r} from ranks {[rank.rank for rank in wanted]}", seconds)

    def event(self, rank: int, what: str, seconds: float = PATIENCE) -> Event:
        """The last such event of a rank; waits for it."""
        self.said(what, [rank], seconds)
        return self.ranks[rank].said(what)[-1]

    def signal(self, rank: int, number: int) -> float:
        """Send a signal, and return when."""
        at = time.monotonic()
        os.kill(self.ranks[rank].pid, number)
        return at

    def ended(self, ranks: list[int] | None = None, seconds: float = PATIENCE) -> list[int]:
        """Wait for the ends of these ranks (None: all); their statuses."""
        wanted = [self.ranks[rank] for rank in (self.ranks if ranks is None else ranks)]

        def all_ended() -> bool:
            return all(rank.status is not None for rank in wanted)

        self.until(all_ended, f"ends of ranks {[rank.rank for rank in wanted]}", seconds)
        self.pump()
        return [rank.status for rank in wanted if rank.status is not None]

    def transcript(self) -> str:
        """Everything that was said, for a failing test."""
        lines = []
        for rank in self.ranks.values():
            state = "runs" if rank.status is None else f"ended with {rank.status}"
            lines.append(f"--- rank {rank.rank}, process {rank.pid}, {state}")
            lines += [json.dumps(event)[:600] for event in rank.events[-12:]]
            lines += rank.text[-30:]
        return "\n".join(lines)

    def close(self) -> None:
        """Kill whatever is left, and see that it is gone."""
        for rank in self.ranks.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if rank.status is None:
                    os.killpg(rank.pid, signal.SIGKILL)
                    os.kill(rank.pid, signal.SIGKILL)
        left = [rank for rank in self.ranks.values() if rank.status is None]
        with contextlib.suppress(HungError):
            self.until(lambda: all(rank.status is not None for rank in left), "the end", 10)
        for rank in self.ranks.values():
            os.close(rank.output)
        self._selector.close()
        self.server.close()
        os.close(self._secret)


def launch(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """The real launcher, in a process group of its own; output on one pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "pgasdl", "run", *arguments],
        env=environment(**variables),
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def launched(*arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher that is gone afterwards, with all it started."""
    process = launch(*arguments, **variables)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


DETECTIONS: list[tuple[float, str]] = []


def record_detection(seconds: float, what: str) -> None:
    """Keep how long it took from a kill to a survivor's error, for the summary of the run."""
    DETECTIONS.append((seconds, what))
