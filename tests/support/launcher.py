"""``pgasdl run``, as a user starts it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from support import starting
from support.environment import environment

PGASDL = (sys.executable, "-m", "pgasdl")


def command(*arguments: str) -> list[str]:
    return [*PGASDL, "run", *arguments]


def run(
    *arguments: str,
    stdin: str = "",
    cwd: Path | str = "/",
    timeout: float = 60,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """The end and the output of a job."""
    return starting.finished(
        command(*arguments), env=environment(**variables), timeout=timeout, cwd=cwd, stdin=stdin
    )


def running(
    *arguments: str, stderr: int = subprocess.PIPE, **variables: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    """A job that runs during the ``with`` block and is ended after it.

    It ignores no signal, although these tests may, such as SIGHUP under nohup.
    """
    words = ["env", "--default-signal", *command(*arguments)]
    return starting.running(words, env=environment(**variables), stderr=stderr)


def torchrun(
    *arguments: str, timeout: float = 200, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The end and the output of a job of PyTorch's launcher on this machine."""
    here = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    return starting.finished(
        [sys.executable, "-m", "torch.distributed.run", *here, *arguments],
        env=environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", **variables),
        timeout=timeout,
        cwd="/",
    )


def agent_of_two(host: str, program: Sequence[str]) -> str:
    """The command, for a script, of each of two agents of PyTorch's launcher; they meet at a host.

    Each starts one rank.
    """
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=job"]
    agent = ["python3", "-m", "torch.distributed.run", *options, f"--rdzv-endpoint={host}:29400"]
    return shlex.join([*agent, *program])
