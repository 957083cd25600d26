"""Full disks: a job that fills one fails and says why, and the server goes on answering."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs_harness import Server, ask, kill_and_see_it_gone
from support.patience import until
from support.requiring import lacking

from pgasdl import JobError
from pgasdl.jobs.places import Places


def test_a_log_that_grows_beyond_the_limit_of_files(server: Server) -> None:
    assert server.process is not None
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    job = server.submit("fills.py", ranks=2)
    ended = server.client.wait(job)
    assert ended["state"] == "failed"
    assert ended["reason"] == "the log cannot be written: File too large"
    assert server.places.log(job).stat().st_size == 1 << 20
    later = server.submit()
    server.ranks(later)
    server.release(later)
    assert server.client.wait(later)["state"] == "done"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        lacking("only root can mount a small disk")
    yield place
    assert until(lambda: subprocess.run(["umount", str(place)], check=False).returncode == 0)


def fill(file: Path) -> None:
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as filling:
        while filling.write(bytes(4096)):
            pass


@pytest.fixture
def cramped(small: Path, make_server: Callable[..., Server]) -> Iterator[Server]:
    server = make_server(file=small / "jobs.db")
    server.start()
    yield server
    server.close()


def test_a_job_that_fills_the_disk(cramped: Server) -> None:
    job = cramped.submit("fills.py", ranks=2)
    ended = cramped.client.wait(job)
    assert ended["state"] == "failed"
    assert ended["reason"] == "the log cannot be written: No space left on device"
    assert not cramped.places.reserve.exists()  # it was needed
    assert cramped.client.log(job).startswith(b"[")


def test_a_full_disk(cramped: Server) -> None:
    """One end can be written down, thanks to the reserve; the next one when there is space."""
    jobs = [cramped.submit(), cramped.submit()]
    ranks = [cramped.ranks(job)[0] for job in jobs]
    fill(cramped.places.file.with_name("stuffing"))
    with pytest.raises(JobError, match="disk is full") as refused:
        cramped.submit()
    assert refused.value.status == 507
    assert [cramped.client.show(job)["state"] for job in jobs] == ["running"] * 2
    kill_and_see_it_gone(ranks[0])
    ended = cramped.client.wait(jobs[0])
    assert (ended["state"], ended["status"]) == ("failed", 137)
    fill(cramped.places.file.with_name("more"))
    kill_and_see_it_gone(ranks[1])
    assert until(lambda: ask(cramped, "GET", "/readyz")[0] == 503)
    assert "cannot be written" in ask(cramped, "GET", "/readyz")[2]["detail"]
    assert cramped.client.show(jobs[1])["state"] == "running"
    cramped.places.file.with_name("stuffing").unlink()
    assert cramped.client.wait(jobs[1])["status"] == 137
    assert ask(cramped, "GET", "/readyz")[0] == 200 and cramped.places.reserve.exists()
    job = cramped.submit("-m", "platform")
    assert cramped.client.wait(job)["state"] == "done"


def test_a_file_that_others_use_or_that_is_another(
    make_server: Callable[..., Server], tmp_path: Path
) -> None:
    server, second = make_server("first"), make_server("second")
    server.start()
    second.places = server.places
    job = server.submit()
    server.ranks(job)
    files = [server.places.file, Path(f"{server.places.file}-wal"), server.places.token]
    before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]
    with pytest.raises(AssertionError, match="another job server uses"):
        second.start()
    assert second.process is not None and second.process.returncode == 1
    assert [(file.read_bytes(), file.stat().st_mtime_ns) for file in files] == before
    for make, why in ((os.symlink, "another job server uses"), (os.link, "a hard link")):
        second.places = Places(tmp_path / why.replace(" ", "-"))
        make(server.places.file, second.places.file)
        with pytest.raises(AssertionError, match=why):
            second.start()
        second.places.file.unlink()
    second.places = Places(tmp_path / "letter.txt")
    second.places.file.write_text("Dear reader,\n" * 1000)
    with pytest.raises(AssertionError, match="file is not a database"):
        second.start()
    assert second.places.file.read_text() == "Dear reader,\n" * 1000
    server.release(job)
    assert server.client.wait(job)["state"] == "done"


def test_a_token_that_others_can_read(server: Server) -> None:
    server.end()
    token = server.token
    server.places.token.chmod(0o640)
    with pytest.raises(AssertionError, match="chmod 600"):
        server.start()
    server.places.token.chmod(0o600)
    server.start()
    assert server.token == token  # clients need no new one
