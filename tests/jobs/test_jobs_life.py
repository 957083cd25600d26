"""A job from its request to its end."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs_harness import Server, children
from support.leftovers import alive, gone
from support.patience import PATIENCE
from support.requiring import require_modules

from pgasdl import JobError, PgasTimeoutError


def test_first_in_first_out(shared: Server) -> None:
    """The second, which does not fit beside the first, is not overtaken by the third."""
    first, second, third = (shared.submit(ranks=n) for n in (1, 2, 1))
    shared.ranks(first)
    assert [shared.client.show(job)["state"] for job in (second, third)] == ["queued"] * 2
    shared.release(first)
    shared.ranks(second, 2)
    assert shared.client.show(third)["state"] == "queued"
    assert shared.client.stop(third)["state"] == "stopped"
    assert shared.client.stop(second)["state"] == "stopping"
    assert shared.client.wait(second)["state"] == "stopped"


@pytest.mark.gate
def test_a_training_is_restarted_and_resumes(shared: Server) -> None:
    """A rank is killed, and the other sees it; the end has the bits of an undisturbed training."""
    require_modules("torch", "safetensors")
    job = shared.submit("resumes.py", ranks=2, restarts=1)
    ended = shared.client.wait(job)
    assert ended["state"] == "done", shared.log(job)
    reasons = [event.get("reason", "") for event in shared.client.events(job)]
    again = next(reason for reason in reasons if reason.startswith("started again: "))
    assert re.search(r"with 137: pgasdl run: rank \d \(process \d+\) was killed by SIGKILL", again)
    found = re.findall(r"(\w+): began with (\d+), ended with (\w+)", shared.log(job))
    assert sorted((what, first) for what, first, _ in found) == [
        ("resumed", "4"), ("resumed", "4"), ("undisturbed", "0"), ("undisturbed", "0"),
    ]  # fmt: skip
    assert len({digest for _, _, digest in found}) == 1


def test_a_job_that_ignores_sigterm_is_killed(shared: Server) -> None:
    job = shared.submit("held.py", "stubborn", ranks=2, grace=0)
    ranks = shared.ranks(job, 2)
    shared.client.stop(job)
    ended = shared.client.wait(job)
    assert (ended["state"], ended["status"]) == ("stopped", 128 + signal.SIGKILL)
    assert gone(ranks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_supervisor_stops_its_job(shared: Server, number: int) -> None:
    job = shared.submit(grace=0, restarts=1)
    shared.ranks(job)
    os.kill(shared.supervisor(job), number)
    ranks = shared.ranks(job, 2)  # it was not its user who stopped it
    os.kill(shared.supervisor(job), number)
    ended = shared.client.wait(job)
    assert (ended["state"], gone(ranks)) == ("stopped", True)
    assert "signal" in ended["reason"]


def test_a_killed_launcher_leaves_no_ranks(shared: Server) -> None:
    job = shared.submit(ranks=2)
    ranks = shared.ranks(job, 2)
    os.kill(shared.launcher(job), signal.SIGKILL)
    ended = shared.client.wait(job)
    assert (ended["state"], ended["status"]) == ("failed", 137) and gone(ranks)


def test_what_a_program_leaves_behind_ends_with_its_job(shared: Server) -> None:
    """Even if both processes of the launcher are killed, and it has a session of its own."""
    (shared.root / "leaves.py").write_text(
        "import subprocess, time\n"
        "left = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "print('process', left.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    job = shared.submit("leaves.py")
    left = shared.ranks(job)
    launcher = shared.launcher(job)
    for pid in (*children(launcher), launcher):
        os.kill(pid, signal.SIGKILL)
    assert shared.client.wait(job)["state"] == "failed" and gone(left)


def test_a_launcher_that_hangs_is_killed(shared: Server) -> None:
    job = shared.submit(ranks=2, grace=0)
    ranks = shared.ranks(job, 2)
    os.kill(shared.launcher(job), signal.SIGSTOP)
    shared.client.stop(job)
    ended = shared.client.wait(job)
    assert (ended["state"], ended["status"]) == ("stopped", 137) and gone(ranks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_end_of_the_server_is_not_the_jobs(server: Server, number: int) -> None:
    """Ctrl-C at a terminal goes to all processes of its group."""
    job = server.submit()
    ranks = server.ranks(job)
    events = server.client.events(job)
    assert next(events)["state"] == "queued"
    assert server.process is not None
    os.killpg(server.process.pid, number)
    assert server.ended() == ""
    assert server.process.returncode == 0 and not server.places.url.exists()
    assert all(map(alive, ranks))
    server.start()
    server.release(job)
    assert server.client.wait(job)["state"] == "done"


def test_what_a_program_sees(shared: Server) -> None:
    code = (
        "import os; print(*sorted(f'{n}={t}' for n, t in os.environ.items() if n in "
        "('HERE', 'PGASDL_JOB_FOLDER', 'PGASDL_TIMEOUT', 'PGASDL_SIZE')), os.getcwd(), "
        "sep='|', flush=True)"
    )
    folder = shared.root / "inner"
    folder.mkdir()
    (folder / "sees.py").write_text(code)
    environment = {"HERE": "a b$(x)", "PGASDL_TIMEOUT": "7"}
    job = shared.submit("sees.py", folder="inner", environment=environment)
    assert shared.client.wait(job)["state"] == "done"
    own = shared.places.own(job)
    seen = f"[0] HERE=a b$(x)|PGASDL_JOB_FOLDER={own}|PGASDL_SIZE=1|PGASDL_TIMEOUT=7|{folder}\n"
    assert shared.client.log(job).decode() == seen
    module = shared.submit("-m", "sees", folder=str(folder), environment=environment)
    assert shared.client.wait(module)["state"] == "done"
    assert shared.client.log(module).decode() == seen.replace(
        str(own), str(shared.places.own(module))
    )


def test_a_log_that_is_cut_short(shared: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    client, job = shared.client, shared.submit()
    shared.ranks(job)
    pieces = client.follow(job)
    assert b"process" in next(pieces)
    shared.places.log(job).write_text("x")
    assert next(pieces) == b"x"
    shared.release(job)
    assert list(pieces) == []
    monkeypatch.setattr(client, "log", lambda *_: b"")  # cut after its size was told
    assert list(client.follow(job)) == []


def test_who_waits_is_told_nothing_else(shared: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    client, job = shared.client, shared.submit()
    shared.ranks(job)
    told: list[str] = []
    stream = client._stream

    def heard(*arguments: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, event in stream(*arguments):
            told.append(event["event"])
            yield number, event

    monkeypatch.setattr(client, "_stream", heard)
    shared.release(job)
    client.wait(job)
    list(client.follow(job))
    assert "end" in told and set(told) <= {"log", "end"}


def test_a_log_is_followed_as_it_grows(shared: Server) -> None:
    job = shared.submit()
    pieces = shared.client.follow(job)
    seen = next(pieces)
    assert seen.startswith(b"[0] process ")
    shared.release(job, 4)
    seen += b"".join(pieces)
    assert b"ended with 4" in seen and seen == shared.client.log(job)
    assert shared.client.log(job, len(seen) - 5) == seen[-5:]
    assert shared.client.log(job, len(seen) + 5) == b""


def test_a_wait_has_a_deadline(shared: Server) -> None:
    job = shared.submit()
    with pytest.raises(PgasTimeoutError, match=f"job {job} has not ended after 0.3 s"):
        shared.client.wait(job, 0.3)


def test_a_staging_that_fails_is_the_jobs_end(shared: Server) -> None:
    stage = {"remote": ["there_is_none.tar"], "local": "staged"}
    job = shared.submit(stage=stage)
    ended = shared.client.wait(job)
    assert ended["state"] == "failed" and "pgasdl stage ended with" in ended["reason"]
    assert "there_is_none.tar" in shared.log(job)


def test_a_job_that_failed_says_why(shared: Server) -> None:
    told = {
        "raise ValueError('no such layer')": r"rank 0 .* ended with 1: ValueError: no such layer$",
        "import sys; sys.exit('\\x1b[2J no data')": r": \[\d\] \?\[2J no data; pgasdl run: rank",
        "import os; os._exit(5)": r"ended with 5: pgasdl run: rank \d .* ended with 5",
    }
    for number, (text, why) in enumerate(told.items()):
        (shared.root / f"fails_{number}.py").write_text(text)
        ended = shared.client.wait(shared.submit(f"fails_{number}.py", ranks=1 + (number > 0)))
        assert ended["state"] == "failed" and re.search(why, ended["reason"]), ended["reason"]
    ended = shared.client.wait(shared.submit("-m", "there_is_none"))
    assert "No module named there_is_none" in ended["reason"]


def test_what_was_there_at_the_request_is_looked_at_again(shared: Server, tmp_path: Path) -> None:
    (shared.root / "later").mkdir()
    (shared.root / "later/held.py").write_bytes((shared.root / "held.py").read_bytes())
    first = shared.submit(ranks=2)
    shared.ranks(first, 2)
    second = shared.submit("later/held.py")
    third = shared.submit("held.py", folder="later")
    (shared.root / "later/held.py").unlink()
    (shared.root / "later").rename(tmp_path / "elsewhere")
    (shared.root / "later").symlink_to(tmp_path / "elsewhere")
    shared.release(first)
    for job in (second, third):
        ended = shared.client.wait(job)
        assert ended["state"] == "failed" and "is not under the server's root" in ended["reason"]


def test_a_program_that_cannot_be_started(shared: Server) -> None:
    job = shared.submit("held.py", "\u20ac" * 60_000)  # more bytes than Linux takes as one word
    ended = shared.client.wait(job)
    assert (ended["state"], ended["status"]) == ("failed", None)
    assert "cannot be started" in ended["reason"] and "too long" in ended["reason"]


def test_changes_that_do_not_fit_the_state(shared: Server) -> None:
    job = shared.submit(grace=0)
    shared.ranks(job)
    with pytest.raises(JobError, match="stop it first") as refused:
        shared.client.restart(job)
    assert refused.value.status == 409
    shared.client.stop(job)
    shared.client.wait(job)
    with pytest.raises(JobError, match="stopped already") as refused:
        shared.client.stop(job)
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
