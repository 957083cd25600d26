"""The server controls and watches: it touches no segment, and loads nothing that could."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs_harness import Server
from support.environment import environment

from pgasdl.runtime.launch.run import inherited


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("pgasdl.jobs.server", ("pgasdl._native", "numpy", "torch")),
        ("pgasdl.tools.job_cli", ("pgasdl._native", "numpy", "starlette", "uvicorn")),
        ("pgasdl.jobs.client", ("pgasdl._native", "numpy", "starlette", "uvicorn", "click")),
        ("pgasdl.jobs.supervisor", ("pgasdl._native", "numpy", "sqlite3", "http", "starlette")),
    ],
)
def test_what_is_not_loaded(module: str, without: tuple[str, ...]) -> None:
    code = (
        f"import sys; before = {{*sys.modules}}; import {module}; "  # coverage loads some, too
        f"loaded = {{*{without!r}}} & (sys.modules.keys() - before); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-P", "-c", code], env=environment(), check=True)


def test_the_server_opens_no_segment(server: Server) -> None:
    """While a job has segments: neither its core, nor shared memory, nor a memfd is mapped."""
    job = server.submit("segments.py", ranks=2)
    ranks = server.ranks(job, 2)
    assert server.process is not None
    for pid, opens in [
        (server.process.pid, False),
        (server.supervisor(job), False),
        (ranks[0], True),
    ]:
        mapped = Path(f"/proc/{pid}/maps").read_text()
        links = (Path(f"/proc/{pid}/fd") / name for name in Path(f"/proc/{pid}/fd").iterdir())
        opened = " ".join(str(link.readlink()) for link in links)
        assert ("memfd:" in mapped + opened) == opens
        assert ("_native" in mapped) == opens
        assert "/dev/shm" not in mapped + opened
    server.release(job)
    assert server.client.wait(job)["state"] == "done"


def test_a_job_inside_of_a_rank_is_not_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGASDL_JOB_LINK", "link.json")
    monkeypatch.delenv("PGASDL_RANK", raising=False)
    assert inherited()["PGASDL_JOB_LINK"] == "link.json"
    monkeypatch.setenv("PGASDL_RANK", "0")
    assert "PGASDL_JOB_LINK" not in inherited()


def test_a_server_inside_of_a_rank_has_jobs(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.start(PGASDL_RANK="0")
    (rank,) = server.ranks(server.submit())
    assert b"\0PGASDL_JOB_LINK=" in Path(f"/proc/{rank}/environ").read_bytes()
