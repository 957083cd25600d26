"""Run random programs for minutes on eight ranks, of which one after another is killed.

``python tests/random_programs/long_run.py --way shm --minutes 10`` prints a report as JSON. It ends
with status 1 if a result was wrong, a call hung, a survivor saw anything but the loss, or a process
that lived on holds more than before.

A generation is a context of every rank. Over shm and tcp it ends with a loss: the survivors go on
without the killed rank, close their contexts, and begin the next generation in the same processes,
with a new one in the killed one's place. Over MPI generations follow one another in the same
processes until a loss ends the job; then the launcher starts another one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ways import LAUNCHES, SURVIVES

sys.path.append(str(Path(__file__).parents[1]))
from support.environment import ONE_THREAD, environment
from support.launcher import command as launched
from support.leftovers import gone
from support.output import Event, Lines, event_of
from support.starting import kill_group

WAYS = ("shm", "tcp", "mpich", "openmpi")
_PROGRAM = str(Path(__file__).with_name("generations.py"))
_PATIENCE = 120.0  # until ranks that say nothing count as hung
_GENERATIONS = 100  # of a job over MPI, which is killed before
_WARM = 2  # generations of a process, or looks into one, after which nothing may grow
_GROWTH = 1024  # KiB


class LongRunError(AssertionError):
    """The findings of a long run, with the last output of the ranks."""


class Ranks:
    """The processes of a job, generation after generation, and what they say."""

    def __init__(self, way: str, size: int, first: int, folder: Path) -> None:
        self.way, self.size = way, size
        self.number = first - 1  # of the generation
        self.events: list[Event] = []  # of all generations
        self.pids: set[int] = set()
        self._text: deque[str] = deque(maxlen=300)
        self._lines = Lines()
        self._output, self._theirs = os.pipe()
        self._processes: dict[int, subprocess.Popen[str]] = {}  # over MPI only a launcher
        secret = folder / "secret"
        secret.touch(0o600)
        secret.write_bytes(secrets.token_bytes(32))
        # One arena: malloc keeps what threads have freed in arenas of their own.
        self._environment = environment(
            **ONE_THREAD, PGASDL_SECRET_FILE=str(secret), PGASDL_TIMEOUT="60", MALLOC_ARENA_MAX="1",
            **({"PGASDL_TRANSPORT": way} if way in SURVIVES else {}),
        )  # fmt: skip

    def begin(self, seconds: float, generations: int = 1) -> None:
        """Begin the next generation, with new processes in place of those that are lost.

        Over MPI the job goes on for several ``generations``.
        """
        self.number += 1
        program = [_PROGRAM, self.way, str(self.size)]
        if self.way in SURVIVES:
            for rank in range(self.size):
                if rank not in self._processes:
                    self._start(rank, [sys.executable, *program])
                stdin = self._processes[rank].stdin
                assert stdin is not None
                order = {"number": self.number, "seconds": seconds, "rank": rank}
                stdin.write(json.dumps(order) + "\n")
                stdin.flush()
        else:
            options = ("-n", str(self.size), *LAUNCHES[self.way])
            orders = [
                json.dumps({"number": self.number + n, "seconds": seconds, "rank": 0})
                for n in range(generations)
            ]
            self._start(0, launched(*options, *program, *orders))
        self.wait_for("running", range(self.size))

    def _start(self, rank: int, command: list[str]) -> None:
        self._processes[rank] = subprocess.Popen(
            command, env=self._environment, cwd="/", stdin=subprocess.PIPE, stdout=self._theirs,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def said(self, what: str) -> dict[int, Event]:
        """These events of this generation, by rank."""
        return {
            event["rank"]: event
            for event in self.events
            if event["event"] == what and event["generation"] == self.number
        }

    def wait_for(self, what: str, ranks: Iterable[int]) -> None:
        """Wait until these ranks have said it."""
        ranks = set(ranks)
        self._until(lambda: ranks <= self.said(what).keys(), what, alive=True)

    def sleep(self, seconds: float) -> None:
        """Let the ranks work for a while."""
        end = time.monotonic() + seconds
        self._until(lambda: time.monotonic() >= end, "", alive=True)

    def kill(self, victim: int) -> None:
        """Kill a rank; return when its process, or the whole job over MPI, has ended."""
        os.kill(self.said("running")[victim]["pid"], signal.SIGKILL)
        process = self._processes.pop(victim if self.way in SURVIVES else 0)
        self._until(lambda: process.poll() is not None, f"end of process {process.pid}")
        assert process.stdin is not None
        process.stdin.close()
        if self.way not in SURVIVES:
            self.require(gone(self.pids), "processes of a job are left")
            self.number = max(event["generation"] for event in self.events)

    def end(self) -> None:
        """Let all processes end, and require that they end well and that none is left."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        ends = list(self._processes.values())
        self._until(lambda: all(each.poll() is not None for each in ends), "end of the processes")
        statuses = [each.returncode for each in ends]
        self.require(not any(statuses), f"processes ended with {statuses}")
        self.require(gone(self.pids), "processes are left")

    def close(self) -> None:
        """Kill what is left."""
        for process in self._processes.values():
            kill_group(process.pid)
            process.wait()
        for pid in self.pids:
            kill_group(pid)

    def _until(self, condition: Callable[[], bool], what: str, *, alive: bool = False) -> None:
        """Read on until the condition holds; ``alive``: no process may end meanwhile."""
        silent_at = time.monotonic() + _PATIENCE
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            while not condition():
                if selector.select(0.02):
                    silent_at = time.monotonic() + _PATIENCE
                    self._read()
                elif alive and any(each.poll() is not None for each in self._processes.values()):
                    self.require(condition(), "a process ended")
                elif time.monotonic() > silent_at:
                    for process in self._processes.values():
                        os.killpg(process.pid, signal.SIGABRT)  # faulthandler writes its stacks
                    time.sleep(2)
                    self._read()
                    self.require(False, f"hung: no {what}")

    def _read(self) -> None:
        for line in self._lines.of(os.read(self._output, 1 << 18)):
            event = event_of(line)
            if event is None:
                self._text.append(line)
            else:
                self.events.append(event)
                self.pids.add(event["pid"])

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            words = "\n".join(self._text)
            raise LongRunError(f"generation {self.number}, way {self.way}: {what}\n{words}")


def run(way: str, size: int, seconds: float, period: float, seed: int) -> dict[str, Any]:
    """Let ranks be killed, each after ``period`` seconds at most; return a report.

    The last rank is never killed: over shm and tcp its process lives as long as the run.
    """
    dice = random.Random(f"long run {seed}")
    began = time.monotonic()
    n_killed = 0
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(way, size, 1000 * seed, Path(folder))
        try:
            while time.monotonic() - began < seconds - period:
                if way in SURVIVES:
                    ranks.begin(_PATIENCE)
                else:
                    ranks.begin(period / 5, _GENERATIONS)
                ranks.sleep(dice.uniform(0, period))
                victim = dice.randrange(size - 1)
                ranks.kill(victim)
                n_killed += 1
                if way in SURVIVES:
                    ranks.wait_for("ended", set(range(size)) - {victim})
                    named = {event["lost"] for event in ranks.said("ended").values()}
                    ranks.require(named == {victim}, f"lost {victim}; survivors name {named}")
            ranks.begin(max(1.0, seconds - (time.monotonic() - began)))
            ranks.wait_for("ended", range(size))
            ranks.end()
        finally:
            ranks.close()
    more, done = growth(ranks.events, way), work(ranks.events)
    report = {
        "way": way, "ranks": size, "seed": seed, "seconds": round(time.monotonic() - began),
        "generations": len({event["generation"] for event in ranks.events}), "killed": n_killed,
        "processes": len(ranks.pids), "programs": done.pop("programs"), "growth": more,
        "steps": dict(done.most_common()),
    }  # fmt: skip
    ranks.require(not too_much(more), f"processes hold more: {too_much(more)} in {report}")
    return report


def work(events: list[Event]) -> Counter[str]:
    """How many programs and steps a rank has carried out, the last one of each generation."""
    ended = {event["generation"]: event["done"] for event in events if event["event"] == "ended"}
    return sum(map(Counter, ended.values()), Counter())


def growth(events: list[Event], way: str) -> dict[str, int]:
    """How much more a process held at its end than when it was warm, the most of all processes.

    Between generations: descriptors, regions of shared memory, threads, KiB of memory. With the
    context closed; over MPI, where a window is freed when a later one is made, with the next one
    open. Within a generation, where a context keeps what it has bound: the first two.
    """
    moment = "after" if way in SURVIVES else "before"
    more: Counter[str] = Counter()
    lives: dict[int, list[dict[str, int]]] = {}
    for event in events:
        if moment in event:
            lives.setdefault(event["pid"], []).append(event[moment])
        if event["event"] == "ended":
            for warm in event["inside"][_WARM:]:
                for name in ("descriptors", "regions"):
                    grown = event["inside"][-1][name] - warm[name]
                    more[f"{name} within"] = max(more[f"{name} within"], grown)
    for life in lives.values():
        for warm in life[_WARM:]:
            for name, value in life[-1].items():
                more[name] = max(more[name], value - warm[name])
    return dict(more)


def too_much(more: dict[str, int]) -> dict[str, int]:
    """Those of these numbers by which no process may grow."""
    return {name: n for name, n in more.items() if n > (_GROWTH if name == "kib" else 0)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--way", choices=WAYS, default="shm")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--period", type=float, default=15, help="longest life of a rank, seconds")
    parser.add_argument(
        "--seed", type=int, default=0, help="of ranks and times; programs are fixed"
    )
    given = parser.parse_args()
    report = run(given.way, given.ranks, given.minutes * 60, given.period, given.seed)
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
