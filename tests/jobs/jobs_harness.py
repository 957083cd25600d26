"""A real job server, which a test may kill and start again, and the processes of its jobs."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.environment import environment
from support.leftovers import alive, gone
from support.patience import PATIENCE, until
from support.starting import kill_group

from pgasdl import JobError
from pgasdl.jobs import Client
from pgasdl.jobs.job import ENDED
from pgasdl.jobs.places import Places

PROGRAMS = Path(__file__).parent / "programs"
PGASDL = (sys.executable, "-P", "-m", "pgasdl")
Job = dict[str, Any]


class Server:
    """``pgasdl serve`` on a file of its own; its jobs run in a folder with the programs."""

    def __init__(self, base: Path, *options: str, slots: int = 2, file: Path | None = None) -> None:
        self.root = base / "root"
        self.root.mkdir()
        for program in PROGRAMS.iterdir():
            if program.is_file():
                (self.root / program.name).write_bytes(program.read_bytes())
        self.places = Places(file or base / "state/jobs.db")
        self.options = (*options, f"--slots={slots}")
        self.process: subprocess.Popen[str] | None = None
        self.url = ""

    def command(self) -> list[str]:
        return [
            *PGASDL, "serve", f"--file={self.places.file}", f"--root={self.root}", *self.options
        ]  # fmt: skip

    def start(self, command: Sequence[str] = (), **variables: str) -> Client:
        """Start it, and wait until it takes requests."""
        self.process = subprocess.Popen(
            command or self.command(), env=environment(**variables), cwd="/",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        told = self.process.stdout.readline()
        found = re.search(r"http://\S+:\d+", told)
        assert found, f"{told}{self.end(signal.SIGKILL)}"
        self.url = found[0]
        return self.client

    @property
    def token(self) -> str:
        return self.places.token.read_text().strip()

    @property
    def client(self) -> Client:
        return Client(self.url, self.token, patience=PATIENCE)

    def end(self, number: int = signal.SIGTERM) -> str:
        """End it, and return what it wrote to standard error; jobs run on."""
        assert self.process is not None
        os.kill(self.process.pid, number)
        return self.ended()

    def ended(self) -> str:
        """Wait for its end; what it wrote to standard error."""
        assert self.process is not None
        return self.process.communicate(timeout=PATIENCE)[1]

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def close(self) -> None:
        """End all that is left: the server, supervisors, launchers and ranks."""
        if self.process is not None and self.process.returncode is None:
            self.kill()
        for pid in supervisors(self.places.file.parent):
            kill_group(pid)
        assert until(lambda: not supervisors(self.places.file.parent))

    # --- jobs

    def stop_all(self) -> None:
        left = [job for job in self.client.jobs(1000)["jobs"] if job["state"] not in ENDED]
        for job in left:
            with contextlib.suppress(JobError):  # it has just ended
                self.client.stop(job["id"])
        for job in left:
            self.client.wait(job["id"], PATIENCE)

    def submit(self, *words: str, **request: Any) -> int:
        """Submit a program, by default a held one of one rank; its number."""
        job: int = self.client.submit(list(words or ("held.py",)), **request)["id"]
        return job

    def reaches(self, job: int, state: str) -> Job:
        """Wait until a job is in a state."""
        found: Job = {}

        def there() -> bool:
            found.update(self.client.show(job))
            return bool(found["state"] == state)

        assert until(there, PATIENCE / 2), f"job {job} is {found}, not {state}: {self.log(job)}"
        return found

    def log(self, job: int) -> str:
        file = self.places.log(job)
        return file.read_text() if file.exists() else ""

    def ranks(self, job: int, n: int = 1) -> list[int]:
        """Wait until as many held ranks run in all; the numbers of the last ones' processes."""
        found: list[str] = []

        def there() -> bool:
            found[:] = re.findall(r"\] process (\d+)", self.log(job))
            return len(found) >= n

        assert until(there, PATIENCE / 2), f"{self.client.show(job)}: {self.log(job)}"
        return [int(pid) for pid in found]

    def release(self, job: int, status: int = 0) -> None:
        """Let held ranks end."""
        new = self.places.own(job) / "end.new"
        new.write_text(str(status))
        new.rename(new.with_name("end"))

    def supervisor(self, job: int) -> int:
        """The process that supervises a job now."""
        (pid,) = supervisors(self.places.job(job))
        return pid

    def launcher(self, job: int) -> int:
        """The process of ``pgasdl run`` of a job: the only child of its supervisor."""
        (pid,) = children(self.supervisor(job))
        return pid


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def supervisors(below: Path) -> list[int]:
    """Processes that supervise a step whose folder lies below another."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if "pgasdl.jobs.supervisor" in words and any(
                word.startswith(f"{below}/") for word in words
            ):
                found.append(int(entry.name))
    return [pid for pid in found if alive(pid)]


def kill_and_see_it_gone(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert gone([pid])


def ask(
    server: Server, method: str, path: str, body: Any = None, **headers: str | None
) -> tuple[int, http.client.HTTPMessage, Any]:
    """The status, the headers and the document of an answer; a header that is None is left out."""
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    names = {name.replace("_", "-"): text for name, text in headers.items()}
    given = {"Authorization": f"Bearer {server.token}"} | names
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    if isinstance(body, dict):
        given = {"Content-Type": "application/json"} | given
    connection.request(
        method, path, content, {name: text for name, text in given.items() if text is not None}
    )
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, answer.headers, json.loads(data)
