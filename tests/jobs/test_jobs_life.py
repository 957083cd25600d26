"""A job from its request to its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs_harness import Server
from support.leftovers import alive, gone
from support.patience import PATIENCE

from pgasdl import JobError, Timeout


def test_first_in_first_out(server: Server) -> None:
    """The second, which does not fit beside the first, is not overtaken by the third."""
    first, second, third = (server.submit(ranks=n) for n in (1, 2, 1))
    server.ranks(first)
    assert [server.client.show(job)["state"] for job in (second, third)] == ["queued"] * 2
    server.release(first)
    server.ranks(second, 2)
    assert server.client.show(third)["state"] == "queued"
    assert server.client.stop(third)["state"] == "stopped"
    assert server.client.stop(second)["state"] == "stopping"
    assert server.client.wait(second)["state"] == "stopped"


def test_a_job_is_restarted_and_resumes(server: Server) -> None:
    """Ranks that really communicate; one is killed, and the other sees it."""
    job = server.submit("resumes.py", ranks=2, restarts=1)
    ended = server.client.wait(job)
    assert ended["state"] == "done", server.log(job)
    assert server.log(job).count("resumed and ended with 9.0") == 2
    reasons = [event.get("reason", "") for event in server.client.events(job)]
    assert "started again: pgasdl run ended with 137" in reasons
    assert server.client.restart(job)["restarts_left"] == 1
    assert server.client.wait(job)["state"] == "done"
    assert server.log(job).count("resumed and ended with") == 4


def test_a_job_that_ignores_sigterm_is_killed(server: Server) -> None:
    job = server.submit("held.py", "stubborn", ranks=2, grace=0)
    ranks = server.ranks(job, 2)
    server.client.stop(job)
    ended = server.client.wait(job)
    assert (ended["state"], ended["status"]) == ("stopped", 128 + signal.SIGKILL)
    assert gone(ranks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_supervisor_stops_its_job(server: Server, number: int) -> None:
    job = server.submit(grace=0)
    ranks = server.ranks(job)
    os.kill(server.supervisor(job), number)
    ended = server.client.wait(job)
    assert (ended["state"], gone(ranks)) == ("stopped", True)
    assert "signal" in ended["reason"]


def test_a_killed_launcher_leaves_no_ranks(server: Server) -> None:
    job = server.submit(ranks=2)
    ranks = server.ranks(job, 2)
    supervisor = server.supervisor(job)
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    ended = server.client.wait(job)
    assert (ended["state"], ended["status"]) == ("failed", 137) and gone(ranks)


def test_the_end_of_the_server_is_not_the_jobs(server: Server) -> None:
    job = server.submit()
    ranks = server.ranks(job)
    assert server.end(signal.SIGTERM) == "" and server.process is not None
    assert server.process.returncode == 0 and not server.places.url.exists()
    assert all(map(alive, ranks))
    server.start()
    server.release(job)
    assert server.client.wait(job)["state"] == "done"


def test_what_a_program_sees(server: Server) -> None:
    code = (
        "import os; print(*sorted(f'{n}={t}' for n, t in os.environ.items() if n in "
        "('HERE', 'PGASDL_JOB_FOLDER', 'PGASDL_TIMEOUT', 'PGASDL_SIZE')), os.getcwd(), "
        "sep='|', flush=True)"
    )
    folder = server.root / "inner"
    folder.mkdir()
    (folder / "sees.py").write_text(code)
    environment = {"HERE": "a b$(x)", "PGASDL_TIMEOUT": "7"}
    job = server.submit("sees.py", folder="inner", environment=environment)
    assert server.client.wait(job)["state"] == "done"
    own = server.places.own(job)
    seen = f"[0] HERE=a b$(x)|PGASDL_JOB_FOLDER={own}|PGASDL_SIZE=1|PGASDL_TIMEOUT=7|{folder}\n"
    assert server.client.log(job).decode() == seen
    module = server.submit("-m", "sees", folder=str(folder), environment=environment)
    assert server.client.wait(module)["state"] == "done"
    assert server.client.log(module).decode() == seen.replace(
        str(own), str(server.places.own(module))
    )


def test_a_log_is_followed_as_it_grows(server: Server) -> None:
    job = server.submit()
    pieces = server.client.follow(job)
    seen = next(pieces)
    assert seen.startswith(b"[0] process ")
    server.release(job, 4)
    seen += b"".join(pieces)
    assert b"ended with 4" in seen and seen == server.client.log(job)
    assert server.client.log(job, len(seen) - 5) == seen[-5:]
    assert server.client.log(job, len(seen) + 5) == b""


def test_a_wait_has_a_deadline(server: Server) -> None:
    job = server.submit()
    with pytest.raises(Timeout, match=f"job {job} has not ended after 0.3 s"):
        server.client.wait(job, 0.3)


def test_a_staging_that_fails_is_the_jobs_end(server: Server) -> None:
    stage = {"remote": ["there_is_none.tar"], "local": "staged"}
    job = server.submit(stage=stage)
    ended = server.client.wait(job)
    assert ended["state"] == "failed" and "pgasdl stage ended with" in ended["reason"]
    assert "there_is_none.tar" in server.log(job)


def test_what_was_there_at_the_request_is_looked_at_again(server: Server, tmp_path: Path) -> None:
    (server.root / "later").mkdir()
    (server.root / "later/held.py").write_bytes((server.root / "held.py").read_bytes())
    first = server.submit(ranks=2)
    server.ranks(first, 2)
    second = server.submit("later/held.py")
    third = server.submit("held.py", folder="later")
    (server.root / "later/held.py").unlink()
    (server.root / "later").rename(tmp_path / "elsewhere")
    (server.root / "later").symlink_to(tmp_path / "elsewhere")
    server.release(first)
    for job in (second, third):
        ended = server.client.wait(job)
        assert ended["state"] == "failed" and "is not under the server's root" in ended["reason"]


def test_changes_that_do_not_fit_the_state(server: Server) -> None:
    job = server.submit(grace=0)
    server.ranks(job)
    with pytest.raises(JobError, match="stop it first") as refused:
        server.client.restart(job)
    assert refused.value.status == 409
    server.client.stop(job)
    server.client.wait(job)
    with pytest.raises(JobError, match="stopped already") as refused:
        server.client.stop(job)
    assert refused.value.status == 409


def test_fewer_slots_than_a_job_in_the_queue_needs(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.start()
    first, second = server.submit(ranks=2), server.submit(ranks=2)
    server.ranks(first, 2)
    server.kill()
    server.options = ("--slots=1",)
    server.start()
    third = server.submit()
    server.release(first)
    ended = server.client.wait(second, PATIENCE)
    assert ended["state"] == "failed" and "2 ranks; the server has 1 slots" in ended["reason"]
    server.ranks(third)
