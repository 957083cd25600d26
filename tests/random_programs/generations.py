"""One rank of a long run: ``python generations.py WAY SIZE [ORDER ...]``.

An order is a generation of the job: JSON, ``{"rank", "number", "seconds"}``. It runs programs of
seeds of its own, and ends when its seconds are over, or with the loss of a rank: then the others go
on as survivors, close their contexts, and take the next order in the same processes. Without
orders as arguments they are lines of standard input. Events are JSON, a line each.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from collections import Counter
from typing import Any

import numpy as np
from generator import FEATURES, after_loss, program_of
from rank import Rank
from ways import SURVIVES, possible, tell

import pgasdl

PROGRAMS = 100_000  # seeds of a generation
_EVERY = 16  # programs, then memory is looked at


def held() -> dict[str, int]:
    """The things that this process holds.

    Memory without pages of files: a process that has done little before it counts as warm still
    reads 1 MB of code.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        kib = next(int(line.split()[1]) for line in file if line.startswith("Anonymous:"))
    with open("/proc/self/maps", encoding="ascii") as file:
        regions = sum("/memfd:" in line for line in file)
    links = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
    return {
        "descriptors": len(links),
        "sockets": sum("/socket:" in each for each in links),
        "regions": regions,
        "threads": len(os.listdir("/proc/self/task")),
        "kib": kib,
    }


class Generation:
    """One job, from init to its end."""

    def __init__(self, way: str, size: int, rank: int, number: int, seconds: float) -> None:
        self.way, self.size, self.rank, self.number = way, size, rank, number
        self.seconds = seconds
        self.done: Counter[str] = Counter()
        self.held: list[dict[str, int]] = []

    def run(self) -> None:
        place = {"rank": self.rank, "size": self.size, "job_id": f"generation-{self.number}"}
        given: dict[str, Any] = place if self.way in SURVIVES else {}
        if self.way == "verbs":  # where nobody takes the store of an earlier one for this one's
            host, port = os.environ["PGASDL_STORE"].rsplit(":", 1)
            given = {"store": f"{host}:{int(port) + 10 * self.number}"}
        lost = None
        with pgasdl.init(log="error", **given) as ctx:
            self.rank = ctx.rank
            rank = Rank(ctx, threads=False)
            try:
                rank.prepare()
                ctx.barrier()
                self.say("running", before=held())  # nobody is killed before all are prepared
                self.programs(rank)
            except pgasdl.PeerLostError as error:
                if self.way not in SURVIVES:
                    raise
                lost = error.rank
                self.survive(rank, lost)
        del rank, ctx
        self.say("ended", lost=lost, done=self.done, inside=self.held, after=held())

    def programs(self, rank: Rank) -> None:
        """Run programs until a rank's time is over."""
        features, mapped = possible(self.way, FEATURES)
        left_out = {"leave"}
        if self.way == "verbs":  # thousands of rounds take minutes where packets are lost
            left_out.add("wrap")
        features = [feature for feature in features if feature not in left_out]
        end = time.monotonic() + self.seconds
        for n in range(PROGRAMS):
            late = np.array([time.monotonic() > end])
            if rank.ctx.world.combine(late.astype(np.int32), "max")[0]:
                break
            seed = self.number * PROGRAMS + n
            program = program_of(seed, features, mapped=mapped, size=self.size)
            rank.run(program)
            rank.give_back()
            self.done["programs"] += 1
            self.done.update(step.what for step in program.steps)
            if n % _EVERY == 0:
                rank.ctx.barrier()
                now = self.settled(rank.ctx)
                rank.ctx.barrier()  # else survivors already hand their group's memory to this one
                self.held.append(now)

    def settled(self, ctx: pgasdl.Context) -> dict[str, int]:
        """The things held, once no more regions than at the least are left, or after 5 s.

        Where packets are lost, the memory of a segment that was deleted may wait so long for the
        last request that reads it. A connection has one region, from its first use on, which is not
        counted, nor are sockets of tcp: which peers a program needs is random.
        """
        least = min((each["regions"] for each in self.held[1:]), default=sys.maxsize)
        end = time.monotonic() + 5
        while True:
            now = held()
            now["regions"] -= ctx.footprint().connections if self.way == "verbs" else 0
            now["descriptors"] -= now["sockets"]
            if now["regions"] <= least or time.monotonic() > end:
                return now
            time.sleep(0.05)

    def survive(self, rank: Rank, lost: int) -> None:
        """Go on without the lost rank, and leave together."""
        rank.clear()
        mapped = possible(self.way, FEATURES)[1]
        program = after_loss(self.number * PROGRAMS, lost, mapped=mapped, size=self.size)
        rank.do(program.steps[0])
        group = rank.objects["left"]
        for step in program.steps[1:]:
            rank.do(step)
        rank.clear()
        group.barrier()

    def say(self, event: str, **data: Any) -> None:
        about = {"event": event, "rank": self.rank, "generation": self.number, "pid": os.getpid()}
        tell(json.dumps(about | data))


def main(arguments: list[str]) -> None:
    faulthandler.enable()
    sys.setswitchinterval(5e-5)  # a rank that waits for the interpreter waits 5 ms otherwise
    way, size, *only = arguments
    try:
        for order in only or iter(sys.stdin.readline, ""):
            Generation(way, int(size), **json.loads(order)).run()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # threads of a failed program may still wait


if __name__ == "__main__":
    main(sys.argv[1:])
