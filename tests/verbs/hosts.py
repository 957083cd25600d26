"""Jobs in guests: what to start on which host, and what every rank said when."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import rig
from support.output import Event, Lines, event_of
from support.places import INSTALLED, TESTS

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
FAR = PROGRAMS / "far.sh"
ADDRESSES = ("10.77.2.1", "10.77.2.2")  # of a pair
_BOOT_SECONDS = 60.0
_FIRST_PORT = 21000
PAUSE = 12.0  # seconds
# A guest stands still, and all its ranks with it, while it reads a file from a slow disk of the
# machine. That is no loss; jobs that cause losses set their own limit.
_PATIENCE = {"PGASDL_STOPPED_AFTER": "15"}


@dataclass
class Job:
    """One job of the list that a pair of hosts, or a host, works through.

    Attributes
    ----------
    program : file, below tests/
    ranks : the ranks of each host
    harm : ("kill" or "stop", rank); ("cut", a rank of the host whose link goes down), only in the
        last job; ("hole", any): from then on both hosts' packets vanish on their way; ("pause",
        rank): its host stands still for `PAUSE` seconds
    replaced : arguments of a process that takes the place of the rank that was killed, or none
    torchrun : ranks get torchrun's variables in place of PGASDL_RANK and the like
    seconds : after which a rank that still runs is killed, and reported as "hung"
    """

    name: str
    program: str
    ranks: Sequence[Sequence[int]]
    arguments: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)
    path: Sequence[str] = ()
    harm: tuple[str, int] | None = None
    replaced: Sequence[str] = ()
    torchrun: bool = False
    seconds: float = 60.0


@dataclass
class Story:
    """The output of one job: each line with its time of arrival and its rank, None for a host."""

    lines: list[tuple[float, int | None, str]] = field(default_factory=list)

    def of(self, rank: int) -> list[str]:
        return [text for _, who, text in self.lines if who == rank]

    def events(self, what: str, rank: int | None = None) -> list[Event]:
        """JSON lines of a rank, or of the hosts; "seen" is the time of arrival here."""
        found = []
        for seen, who, text in self.lines:
            event = event_of(text) if who == rank else None
            if event is not None and event.get("event") == what:
                found.append(event | {"seen": seen})
        return found

    def event(self, what: str, rank: int | None = None) -> Event:
        """The only event of this name."""
        found = self.events(what, rank)
        assert len(found) == 1, f"{len(found)} events {what!r} of rank {rank}\n{self}"
        return found[0]

    def statuses(self) -> dict[int, int]:
        """Exit statuses of the ranks, ended or killed; none may hang or leave a process.

        For a rank that was replaced, that of the last process.
        """
        assert not self.events("hung"), f"hung\n{self}"
        assert not any(event["pids"] for event in self.events("left")), f"left\n{self}"
        return {event["rank"]: event["status"] for event in self.events("ended")}

    def check(self, size: int) -> Story:
        """All ranks ended well."""
        ends = self.statuses()
        assert ends == dict.fromkeys(range(size), 0), f"{self.last_words(ends)}\n{self}"
        return self

    def last_words(self, ends: dict[int, int]) -> str:
        """The last line of each rank that did not end well."""
        return "\n".join(
            f"rank {rank} ended with {status}: {self.of(rank)[-1:]}"
            for rank, status in ends.items()
            if status != 0
        )

    def __str__(self) -> str:
        begin = self.lines[0][0] if self.lines else 0.0
        return "\n".join(
            f"{seen - begin:7.2f} {'host' if who is None else f'rank {who}'}: {text[:1000]}"
            for seen, who, text in self.lines
        )


class _Listener:
    """Sorts the guests' output into stories as it arrives."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.stories = {job.name: Story() for job in jobs}
        self._lines = {1: Lines(), 2: Lines()}

    def __call__(self, guest: int, data: bytes) -> None:
        for line in self._lines[guest].of(data):
            name, _, rest = line.partition(" ")
            rank, _, text = rest.partition(" ")
            if name in self.stories:
                who = None if rank == "-" else int(rank)
                self.stories[name].lines.append((time.monotonic(), who, text))
                if who is None and '"how": "pause"' in text:
                    threading.Thread(target=_pause, args=(guest,)).start()


def _pause(guest: int) -> None:
    """Stop all processes of a guest that this process has booted, then let them go on."""
    (kernel,) = (
        process
        for process in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
        if b"\0umid=guest%d\0" % guest in Path(f"/proc/{process}/cmdline").read_bytes()
    )
    os.killpg(kernel, signal.SIGSTOP)
    time.sleep(PAUSE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(kernel, signal.SIGCONT)


def run(
    folder: Path,
    jobs: Sequence[Job],
    *,
    loss: float = 0.0,
    mode: str = "dummy",
    memory: int = 2 << 30,
    env: Mapping[str, str] | None = None,
) -> dict[str, Story]:
    """Boot one guest, or two if the jobs have two hosts, and run the jobs one after the other.

    Parameters
    ----------
    folder : an empty one, through which the hosts wait for each other
    loss : percent of the packets lost between two hosts, each way
    mode : devices of one host, as of rig.run
    memory : bytes of each host
    env : of the hosts' own processes, of which ranks are children
    """
    n_hosts = len(jobs[0].ranks)
    orders: dict[str, Any] = {"secret": secrets.token_hex(32), "folder": str(folder), "jobs": []}
    for number, job in enumerate(jobs):
        assert len(job.ranks) == n_hosts
        store = ADDRESSES[0] if n_hosts == 2 else "127.0.0.1"
        more: dict[str, Any] = {
            "store": store,
            "port": _FIRST_PORT + number,
            "program": str(TESTS / job.program),
        }
        if job.harm is None and not loss:
            more["env"] = _PATIENCE | job.env
        orders["jobs"].append(asdict(job) | more)
    file = folder / "orders.json"
    file.write_text(json.dumps(orders))
    command = shlex.join([sys.executable, str(PROGRAMS / "host.py"), str(file)])
    listener = _Listener(jobs)
    settings: dict[str, Any] = {
        "env": {"PYTHONPATH": f"{INSTALLED}:{TESTS}"} | dict(env or {}),
        "writable": [folder],
        "timeout": _BOOT_SECONDS + sum(job.seconds for job in jobs),
        "on_output": listener,
        "memory": memory,
    }
    if n_hosts == 2:
        results = rig.run_pair((command, command), loss=loss, **settings)
    else:
        results = (rig.run(command, mode=mode, **settings),)
    for result in results:
        result.check()
    return listener.stories
