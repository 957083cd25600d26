"""Start a command, wait for it no longer than its deadline, and end all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

_GRACE = 10.0  # seconds to end after SIGTERM


def kill_group(pid: int) -> None:
    """Kill the group that a process leads, and those of its children, as torchrun makes them."""
    children: list[str] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children += (thread / "children").read_text().split()
    for leader in (pid, *map(int, children)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)


def finished(
    command: Sequence[str],
    *,
    env: dict[str, str],
    timeout: float,
    cwd: Path | str = "/",
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """The end and the output of a command; if it is late, its process group is killed."""
    with subprocess.Popen(
        command, env=env, cwd=cwd, stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate(stdin or None, timeout)
        except BaseException:
            kill_group(process.pid)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def succeeded(
    command: Sequence[str], *, env: dict[str, str], timeout: float, cwd: Path | str = "/"
) -> str:
    """Standard output of a command that has to end with 0."""
    done = finished(command, env=env, timeout=timeout, cwd=cwd)
    told = f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    assert done.returncode == 0, told
    return done.stdout


@contextlib.contextmanager
def running(
    command: Sequence[str], *, env: dict[str, str], stderr: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    """A command that runs during the ``with`` block; after it, its process group is killed."""
    process = subprocess.Popen(
        command, env=env, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        kill_group(process.pid)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()
