"""Helpers of the tests that start real processes: environments, launchers, what is alive."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import pgasdl.config

PLACE = str(Path(pgasdl.config.__file__).parents[1])
_LAUNCHERS = ("PGASDL_", "PMI", "OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC", "MPI_LOCAL")


def environment(**variables: str) -> dict[str, str]:
    """This process's, without any launcher's traces, and with MPI allowed to run as root."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
    kept.pop("OMP_NUM_THREADS", None)
    kept["OMPI_ALLOW_RUN_AS_ROOT"] = kept["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    kept["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    return kept | {"PYTHONPATH": PLACE} | variables


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pgasdl", "run", *arguments]


def run(
    *arguments: str, stdin: str = "", cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        env=environment(**variables),
        cwd=cwd or "/",
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(*arguments),
        env=environment(),
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def tool(name: str) -> str:
    """Path of a launcher; the test is skipped where it is not installed."""
    path = shutil.which(name, path=os.path.dirname(sys.executable) + ":" + os.environ["PATH"])
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path
