"""Jobs whose ranks are forked from one process, with a deadline over everything they do.

A :class:`Job` serves the store itself, as a launcher does, but ends no rank: tests check what the
survivors do. Programs may print JSON objects, one a line. Whatever a test does, `close` kills every
process group that is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pgasdl.runtime.bootstrap import StoreServer
from pgasdl.runtime.bootstrap.rendezvous import sealed_secret
from support.environment import ONE_THREAD, environment
from support.output import Event, Lines, event_of
from support.patience import PATIENCE
from support.starting import kill_group

_ZYGOTE = str(Path(__file__).with_name("zygote.py"))


_MOST_LINES = 100_000  # of a rank


class HungError(AssertionError):
    """Something did not happen in time; the text holds what every rank had printed."""


def quiet(**variables: str) -> dict[str, str]:
    """Variables of ranks that log only warnings and have no thread pools."""
    return ONE_THREAD | {"PGASDL_LOG": "warning"} | variables


class Zygote:
    """The process that forks ranks, once it has imported these modules; see zygote.py."""

    def __init__(self, *modules: str) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, _ZYGOTE, str(theirs.fileno()), *modules],
                env=environment(**quiet()),
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
        """Note the statuses of ranks that have ended."""
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
    text: list[str] = field(default_factory=list)  # lines that are no events
    lines: Lines = field(default_factory=Lines)

    def said(self, what: str) -> list[Event]:
        return [event for event in self.events if event.get("event") == what]


class Job:
    """``n`` ranks of a program.

    Parameters
    ----------
    program : a file
    folders : where the ranks look for modules, too
    arguments : the program's
    variables : of the ranks' environment
    ranks : those to start now, None: all
    torchrun : the ranks find variables of torchrun, and rank 0 serves the stores
    """

    def __init__(
        self,
        zygote: Zygote,
        program: Path,
        n: int,
        *arguments: object,
        folders: Sequence[Path] = (),
        ranks: list[int] | None = None,
        torchrun: bool = False,
        **variables: str,
    ) -> None:
        self._zygote = zygote
        self._torchrun = torchrun
        self._program = str(program)
        self._folders = folders
        self._arguments = [str(argument) for argument in arguments]
        secret = secrets.token_bytes(32)
        self.n = n
        self.job_id = secrets.token_hex(4)
        self.server = StoreServer(secret, n, job_id=self.job_id)
        if torchrun:  # its port, which no other job has, is rank 0's
            self.server.close()
        self._secret = sealed_secret(secret)
        self._selector = selectors.DefaultSelector()
        self._variables = variables
        self.ranks: dict[int, Rank] = {}
        for rank in range(n) if ranks is None else ranks:
            self.start(rank)

    def start(self, rank: int) -> Rank:
        ours, theirs = os.pipe()
        order = {
            "program": self._program,
            "arguments": self._arguments,
            "folders": [str(folder) for folder in self._folders],
            "environ": environment(*self._folders, **quiet(**self._place(rank), **self._variables)),
        }
        pid = self._zygote.start(order, [theirs, self._secret])
        os.close(theirs)
        os.set_blocking(ours, False)
        self.ranks[rank] = Rank(rank, pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, self.ranks[rank])
        return self.ranks[rank]

    def _place(self, rank: int) -> dict[str, str]:
        host, port = self.server.address
        if self._torchrun:
            return {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.n),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(self.n),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": self.job_id,
            }
        return {
            "PGASDL_RANK": str(rank),
            "PGASDL_SIZE": str(self.n),
            "PGASDL_LOCAL_RANK": str(rank),
            "PGASDL_LOCAL_SIZE": str(self.n),
            "PGASDL_JOB_ID": self.job_id,
            "PGASDL_STORE": f"{host}:{port}",
        }

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def pump(self, seconds: float = 0.0) -> None:
        """Read what the ranks have written; wait at most ``seconds`` for it."""
        for key, _ in self._selector.select(seconds):
            rank: Rank = key.data
            data = os.read(rank.output, 1 << 16)
            if not data:
                self._selector.unregister(rank.output)
                continue
            for line in rank.lines.of(data):
                said = event_of(line)
                if said is None:
                    rank.text.append(line)
                else:
                    rank.events.append(said)
            if len(rank.text) > _MOST_LINES:
                raise HungError(f"rank {rank.rank} prints without end\n{self.transcript()}")
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
        """Wait until these ranks (None: all) have said it; fail as soon as one ends without it."""
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
        """Send a signal; return the time just before it."""
        at = time.monotonic()
        os.kill(self.ranks[rank].pid, number)
        return at

    def ended(self, ranks: list[int] | None = None, seconds: float = PATIENCE) -> list[int]:
        """Wait until these ranks (None: all) have ended; return their statuses."""
        wanted = [self.ranks[rank] for rank in (self.ranks if ranks is None else ranks)]

        def all_ended() -> bool:
            return all(rank.status is not None for rank in wanted)

        self.until(all_ended, f"ends of ranks {[rank.rank for rank in wanted]}", seconds)
        self.pump()
        return [rank.status for rank in wanted if rank.status is not None]

    def transcript(self) -> str:
        """The last of what each rank has printed, for a failing test."""
        lines = []
        for rank in self.ranks.values():
            state = "runs" if rank.status is None else f"ended with {rank.status}"
            lines.append(f"--- rank {rank.rank}, process {rank.pid}, {state}")
            lines += [json.dumps(event)[:600] for event in rank.events[-12:]]
            lines += rank.text[-30:]
        return "\n".join(lines)

    def close(self) -> None:
        """Kill the ranks that are left, and wait until they have ended. Idempotent."""
        if self._selector.get_map() is None:
            return
        for rank in self.ranks.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if rank.status is None:
                    kill_group(rank.pid)
                    os.kill(rank.pid, signal.SIGKILL)
        left = [rank for rank in self.ranks.values() if rank.status is None]
        with contextlib.suppress(HungError):
            self.until(lambda: all(rank.status is not None for rank in left), "the end", 10)
        for rank in self.ranks.values():
            os.close(rank.output)
        self._selector.close()
        self.server.close()
        os.close(self._secret)


def run(
    zygote: Zygote, size: int, program: Path, *arguments: object, timeout: float, **options: Any
) -> str:
    """Run a program on ``size`` ranks; return their lines, which all have to end with 0.

    The lines begin with the rank as those of ``pgasdl run`` do. ``options``: of :class:`Job`.
    """
    job = Job(zygote, program, size, *arguments, **options)
    try:
        statuses = job.ended(seconds=timeout)
        assert not any(statuses), job.transcript()
        return "".join(
            f"[{rank.rank}] {line}\n" for rank in job.ranks.values() for line in rank.text
        )
    finally:
        job.close()
