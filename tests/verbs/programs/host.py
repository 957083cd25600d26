"""One host of a job, inside a guest: forks the ranks of this host, and harms them.

``host.py ORDERS.json`` works through a list of jobs, as hosts.py wrote them. Every line of output
is ``JOB RANK TEXT``; rank ``-`` is this program, whose texts are JSON. Ranks are forked from a
process that has imported everything, because an import takes seconds here. Before and after each
job the hosts of a pair wait for each other, through a folder of the machine that boots them: no
host may end, and no link may work again, while the other host still relies on its state.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from support.output import Lines

import pgasdl.context
import pgasdl.runtime.init
import pgasdl.training.exchange

assert np and pgasdl.context and pgasdl.training.exchange and pgasdl.runtime.init

HOST = int(os.environ["SOFTROCE_GUEST"])
SECRET = "/run/secret"
BETWEEN = 0.3  # seconds from "running" to the harm: then all are in the call that must end
LINK = "vec0"  # to the other host


class Rank:
    """One forked process, and the lines it has written."""

    def __init__(self, rank: int, job: dict[str, Any]) -> None:
        self.rank = rank
        self.said: list[str] = []
        self.status: int | None = None
        self._lines = Lines()
        self.output, output = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for descriptor in (1, 2):
                os.dup2(output, descriptor)
            os.environ.update(place(job, rank))
            os._exit(run_program(job))
        os.close(output)

    def read(self) -> bool:
        """Read what the rank wrote and pass it on; False at the end of its output."""
        data = os.read(self.output, 1 << 16)
        for line in self._lines.of(data):
            self.said.append(line)
            write(str(self.rank), line)
        return bool(data)

    def reap(self) -> bool:
        """Whether it ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None


def place(job: dict[str, Any], rank: int) -> dict[str, str]:
    """The variables by which a rank finds its job."""
    local: list[int] = job["ranks"][HOST - 1]
    common: dict[str, str] = {"PGASDL_SECRET_FILE": SECRET, "OMP_NUM_THREADS": "1"} | job["env"]
    numbers = rank, sum(map(len, job["ranks"])), local.index(rank), len(local)
    if job["torchrun"]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        master = {"MASTER_ADDR": job["store"], "MASTER_PORT": str(job["port"])}
        return common | master | dict(zip(names, map(str, numbers), strict=True))
    names = ("PGASDL_RANK", "PGASDL_SIZE", "PGASDL_LOCAL_RANK", "PGASDL_LOCAL_SIZE")
    store = {"PGASDL_STORE": f"{job['store']}:{job['port']}", "PGASDL_JOB_ID": job["name"]}
    return common | store | dict(zip(names, map(str, numbers), strict=True))


def run_program(job: dict[str, Any]) -> int:
    """In the forked process: run the program as the interpreter would run a file."""
    sys.argv = [job["program"], *job["arguments"]]
    sys.path[:0] = [str(Path(job["program"]).parent), *job["path"]]
    try:
        runpy.run_path(job["program"], run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
    return 0


def write(rank: str, text: str) -> None:
    """Write one line in one piece."""
    os.write(1, f"{current} {rank} {text}\n".encode())


def tell(event: str, **data: Any) -> None:
    write("-", json.dumps({"event": event, **data}))


def harm(how: str, ranks: dict[int, Rank], victim: int) -> None:
    """Do the harm that a test asks for; report the event before."""
    tell("harm", how=how, rank=victim)
    if how == "cut":  # for good: a guest's end of the cable cannot be opened twice
        subprocess.run(["ip", "link", "set", LINK, "down"], check=True)
    elif how == "hole":
        swallow("100%")
    elif how != "pause":  # a pause comes from outside
        os.kill(ranks[victim].pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def swallow(share: str) -> None:
    """Drop this share of the packets that leave this host, without an error to anybody."""
    command = ["tc", "qdisc", "replace", "dev", LINK, "root", "netem", "limit", "10000"]
    subprocess.run([*command, "loss", share], check=True)


def run_job(job: dict[str, Any]) -> list[Rank]:
    """Start this host's ranks and follow them to their ends, or to the deadline."""
    ranks = {rank: Rank(rank, job) for rank in job["ranks"][HOST - 1]}
    more: list[Rank] = []  # in place of ranks that were killed
    how, victim = job["harm"] or ("", -1)
    harm_at: float | None = None
    done = victim not in ranks and how != "hole"
    deadline = time.monotonic() + job["seconds"]
    with selectors.DefaultSelector() as selector:
        for rank in ranks.values():
            selector.register(rank.output, selectors.EVENT_READ, rank)
        while time.monotonic() < deadline:
            for key, _ in selector.select(0.02):
                if not key.data.read():
                    selector.unregister(key.fd)
            if not done and harm_at is None and all(map(runs, ranks.values())):
                harm_at = time.monotonic() + BETWEEN
            if not done and harm_at is not None and time.monotonic() >= harm_at:
                harm(how, ranks, victim)
                done = True
                if job["replaced"]:
                    more.append(Rank(victim, job | {"arguments": job["replaced"]}))
                    selector.register(more[-1].output, selectors.EVENT_READ, more[-1])
            # A rank that was stopped never ends; but it may have ended before that.
            everybody = [*ranks.values(), *more]
            waited = [rank for rank in everybody if not (done and is_stopped(job, rank))]
            if all([rank.reap() for rank in waited]) and not open_outputs(selector, waited):
                break
    return [*ranks.values(), *more]


def runs(rank: Rank) -> bool:
    return any('"running"' in line for line in rank.said)


def is_stopped(job: dict[str, Any], rank: Rank) -> bool:
    return bool(job["harm"]) and job["harm"] == ["stop", rank.rank]


def open_outputs(selector: selectors.BaseSelector, ranks: list[Rank]) -> bool:
    """Whether one of these ranks has not closed its output."""
    return any(key.data in ranks for key in selector.get_map().values())


def device_counters() -> dict[str, int]:
    """The RDMA device's counts since it was made, and its network device's drops."""
    found = {}
    for file in Path("/sys/class/infiniband").glob("*/ports/*/hw_counters/*"):
        with contextlib.suppress(OSError, ValueError):
            found[file.name] = int(file.read_text())
    for name in ("rx_dropped", "tx_dropped", "rx_errors", "tx_errors"):
        with contextlib.suppress(OSError):
            found[name] = int(Path("/sys/class/net", LINK, "statistics", name).read_text())
    return {name: count for name, count in sorted(found.items()) if count}


def finish(job: dict[str, Any], ranks: list[Rank]) -> None:
    """Report how every rank ended and which processes it left, and kill those."""
    for rank in ranks:
        ended = rank.reap()
        if not ended:
            if not is_stopped(job, rank):
                os.kill(rank.pid, signal.SIGABRT)  # faulthandler writes the stacks
                silent_at = time.monotonic() + 2
                while time.monotonic() < silent_at:
                    if select.select([rank.output], [], [], 0.1)[0] and not rank.read():
                        break
            os.kill(rank.pid, signal.SIGKILL)
            _, status = os.waitpid(rank.pid, 0)
            rank.status = os.waitstatus_to_exitcode(status)
        how = "ended" if ended else "stopped" if is_stopped(job, rank) else "hung"
        tell(how, rank=rank.rank, status=rank.status)
        os.close(rank.output)
        left = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        left = [pid for pid in left if session_of(pid) == rank.pid]
        tell("left", rank=rank.rank, pids=left)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    tell("device", **device_counters())


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def meet(folder: str, name: str, n_hosts: int) -> None:
    """Wait for the other host."""
    if n_hosts == 1:
        return
    Path(folder, f"{name}-{HOST}").touch()
    while not Path(folder, f"{name}-{3 - HOST}").exists():
        time.sleep(0.02)


def main() -> None:
    global current  # noqa: PLW0603
    orders = json.loads(Path(sys.argv[1]).read_text())
    with open(SECRET, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(bytes.fromhex(orders["secret"]))
    for job in orders["jobs"]:
        current = job["name"]
        n_hosts = len(job["ranks"])
        meet(orders["folder"], f"{current}-begin", n_hosts)
        tell("begin")
        ranks = run_job(job)
        meet(orders["folder"], f"{current}-end", n_hosts)
        finish(job, ranks)
        if job["harm"] and job["harm"][0] == "hole":
            swallow("0%")


current = "-"

if __name__ == "__main__":
    main()
