"""Where sandboxes or older kernels refuse calls, the job works, or says which and what to do."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from denied import CALLS, NUMBERS
from support.environment import environment
from support.launcher import command
from support.starting import finished
from tiers import full

pytestmark = pytest.mark.skipif(
    platform.machine() not in NUMBERS, reason="the numbers of this machine's system calls"
)

DENIED = str(Path(__file__).with_name("denied.py"))
ERRORS = ("EPERM", "ENOSYS")

# Wakes a sleeping rank, reduces an array outside segments, and accesses bound memory.
PROGRAM = """
import sys, time
import numpy as np
import pgasdl
with pgasdl.init(timeout=40) as ctx:
    if ctx.rank == 1:
        time.sleep(0.3)
    a = np.ones(1000, "f4")
    ctx.allreduce(a, "sum")
    assert (a == ctx.size).all()
    bound, own = ctx.bind(np.full(64, 1 + ctx.rank, "u1")), ctx.segment(64)
    peer = 1 - ctx.rank
    for call, move in (("writev", ctx.write), ("readv", ctx.read)):
        try:
            move(own[0:8], peer, bound[8:16])
            ctx.wait(0)
        except pgasdl.UnavailableError as error:
            sys.stdout.write(f"{call}: {error}\\n")
    ctx.barrier()
    sys.stdout.write("done\\n")
"""

LOST = """
import os, sys
import pgasdl
with pgasdl.init(timeout=40, stopped_after=30) as ctx:
    ctx.barrier()
    if ctx.rank == 1:
        os.kill(os.getpid(), 9)
    try:
        ctx.barrier()
    except pgasdl.PeerLostError as error:
        sys.stdout.write(f"{error.rank} {ctx.health()[1]} {ctx.survivors().size}\\n")
"""


def under(error: str, calls: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return finished(
        [sys.executable, DENIED, error, *calls, "--", *arguments], env=environment(), timeout=100
    )


@pytest.mark.parametrize("error", full(ERRORS, quick=1))
@pytest.mark.parametrize("call", CALLS)
def test_the_job_works_or_says_what_is_refused(call: str, error: str) -> None:
    result = under(error, [call], *command("-n", "2", "-c", PROGRAM))
    if call == "memfd_create":
        assert result.returncode == 1
        assert "Traceback" not in result.stderr
        (line,) = result.stderr.splitlines()
        assert line.startswith("Error: memfd_create is refused here")
        assert "seccomp" in line
        return
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert {"[0] done", "[1] done"} <= set(lines)
    refused = [line for line in lines if "done" not in line]
    if not call.startswith("process_vm"):
        assert not refused
        return
    assert len(refused) == 2
    for line in refused:
        assert line[4:].startswith(call.removeprefix("process_vm_") + ": ")
        assert f"{call} is refused here" in line and "seccomp" in line and "ctx.segment" in line


@pytest.mark.parametrize("error", full(ERRORS, quick=1))
def test_a_segment_that_is_refused_is_unavailable(error: str) -> None:
    program = (
        "import pgasdl\ntry: pgasdl.init()\nexcept pgasdl.UnavailableError as error: print(error)\n"
    )
    result = under(error, ["memfd_create"], sys.executable, "-c", program)
    assert result.returncode == 0, result.stderr
    assert "memfd_create is refused here" in result.stdout and "seccomp" in result.stdout


@pytest.mark.parametrize("error", full(ERRORS, quick=1))
def test_a_dead_rank_is_noticed_without_pidfds(error: str) -> None:
    """Survivors notice it long before its heartbeat would be missed; so does the launcher."""
    arguments = command("-n", "2", "--keep-going", "-c", LOST)
    result = under(error, ["pidfd_open"], *arguments)
    assert result.stdout.splitlines() == ["[0] 1 died 1"], result.stderr
    assert result.returncode == 137
    assert "rank 1" in result.stderr and "SIGKILL" in result.stderr


@pytest.mark.parametrize("error", full(ERRORS, quick=1))
def test_doctor_tells_what_is_refused(error: str) -> None:
    result = under(error, list(CALLS), sys.executable, "-m", "pgasdl", "doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)}
    for name, call, status in (
        ("memfd, sealed", "memfd_create", "FAIL"),
        ("pidfd", "pidfd_open", "WARN"),
        ("process_vm_readv", "process_vm_readv", "WARN"),
        ("membarrier", "membarrier", "WARN"),
    ):
        finding = findings[name]
        assert finding["status"] == status, finding
        assert "refused" in finding["detail"]
        assert call in finding["fix"] and "seccomp" in finding["fix"]
    assert result.returncode == 1
