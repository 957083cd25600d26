"""``pgasdl job`` and ``pgasdl serve`` at a terminal."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs_harness import PGASDL, Server
from support.environment import environment
from support.starting import finished

from pgasdl import ConfigError, JobError
from pgasdl.jobs import Client, client
from pgasdl.tools.cli import main

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(shared: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs ``pgasdl job`` in the server's root; its status, its output, its errors."""
    monkeypatch.setenv("PGASDL_JOB_SERVER", str(shared.places.file))
    monkeypatch.chdir(shared.root)

    def run(*words: str) -> tuple[int, str, str]:
        status = main(["job", *words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_a_job_from_submit_to_wait(shared: Server, say: Say) -> None:
    status, out, _ = say("submit", "-n", "2", "--env", "A=b=c", "--name", "mine", "held.py", "-x")
    assert status == 0
    job = out.strip()
    shared.ranks(int(job), 2)
    found = json.loads(say("show", job, "--json")[1])
    assert found["request"]["program"] == ["held.py", "-x"]
    assert found["request"]["environment"] == {"A": "b=c"}
    assert found["request"]["folder"] == str(shared.root)
    shared.release(int(job), 6)
    status, out, _ = say("log", job, "--follow")
    assert status == 0 and out == say("log", job)[1] and "[1] process" in out
    status, out, _ = say("wait", job)
    assert status == 6 and out.startswith(f"job {job} is failed: its program ended with 6: ")
    assert re.search(r": \[(\d)\] process \d+; pgasdl run: rank \1 ", out)
    assert re.search(rf"\n +{job} failed +2 .* mine\n", say("list")[1])
    assert json.loads(say("list", "--json", "-n", "1")[1])[0]["id"] == int(job)
    assert "status         6\n" in say("show", job)[1]
    shared.release(int(job), 0)
    assert say("restart", job)[:2] == (0, f"job {job} is queued: its user started it again\n")
    assert say("wait", job)[:2] == (0, f"job {job} is done\n")


def test_stop(shared: Server, say: Say) -> None:
    job = say("submit", "--grace", "0", "--restarts", "2", "--", "-m", "held")[1].strip()
    shared.ranks(int(job))
    assert say("wait", job, "--timeout", "0.1")[0] == 124
    assert say("stop", job)[:2] == (0, f"job {job} is stopping: its user stopped it\n")
    status, out, _ = say("wait", job)
    assert status in (137, 143) and "is stopped" in out
    status, _, errors = say("stop", job)
    assert status == 1 and "is stopped already" in errors
    assert "restarts left  2" in say("show", job)[1]


def test_stage(shared: Server, say: Say) -> None:
    (shared.root / "raw").mkdir()
    (shared.root / "raw/0.bin").write_bytes(b"record")
    words = ("--stage", "raw", "--local", "copy", "--format", "folder", "--limit", "1M")
    job = say("submit", *words, "held.py")[1].strip()
    shared.ranks(int(job))
    assert "1 records in 1 files (folder)" in say("log", job)[1]
    shared.release(int(job))
    assert say("wait", job)[0] == 0
    assert say("submit", "--stage", "raw", "held.py")[0] == 2


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ("submit -n 3 held.py", 1, "ranks: 3; the server has 2 slots"),
        ("submit nothing.py", 1, "program[0]: there is no program"),
        ("submit .", 1, "root is a folder without __main__.py"),
        ("submit --env A held.py", 2, "--env A: NAME=VALUE"),
        ("submit --folder / held.py", 1, "folder: / is not under the server's root"),
        ("submit", 2, "Missing argument"),
        ("show 999", 1, "there is no job 999"),
        ("list --state gone", 2, "no state 'gone'"),
        ("--server http://127.0.0.1:1 list", 1, "no job server answers at http://127.0.0.1:1"),
        ("wait 1 --timeout nan", 2, "--timeout nan: seconds, from 0"),
        ("wait 999", 1, "there is no job 999"),
        ("--server ftp://x list", 2, "no URL of a job server"),
        ("--server nothing.db list", 2, "start `pgasdl serve`"),
    ],
)
def test_what_is_refused(
    shared: Server, say: Say, words: str, status: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(shared.root.parent / "xdg"))
    token = shared.root.parent / "xdg/pgasdl/jobs.db.token"
    token.parent.mkdir(parents=True, exist_ok=True)
    token.write_text(shared.token)
    found, out, errors = say(*words.split())
    assert (found, out) == (status, "") and told in errors


def test_what_cannot_be_submitted(
    shared: Server, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, errors = say("submit", "held.py", "caf\udce9.txt")
    assert status == 2 and "'caf\\udce9.txt': a program and its arguments have to" in errors
    gone = shared.root / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    status, _, errors = say("submit", "held.py")
    assert status == 1 and f"there is no folder {gone} (deleted)" in errors
    monkeypatch.chdir("/")


def test_a_program_may_be_a_path(shared: Server) -> None:
    found = shared.client.submit([Path("held.py"), "-x"])
    assert found["request"]["program"] == ["held.py", "-x"]
    with pytest.raises(JobError, match=r"program: 'held.py' is no array"):
        shared.client.submit("held.py")


def test_wait_without_a_server(shared: Server, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_PAUSE", 0)
    monkeypatch.setattr(Client.__init__, "__kwdefaults__", {"patience": 0})
    token = f"--token-file={shared.places.token}"
    status, _, errors = say("--server=http://127.0.0.1:1", token, "wait", "1")
    assert status == 69 and "no job server answers" in errors


def test_by_its_url_and_a_token(
    shared: Server, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGASDL_JOB_SERVER", shared.url)
    token = tmp_path / "token"
    token.write_text(shared.token + "\n")
    assert say("--token-file", str(token), "list")[0] == 0
    token.write_text("x" * 40)
    status, _, errors = say("--token-file", str(token), "list")
    assert status == 1 and "does not know this token" in errors
    token.write_text("")
    assert say("--token-file", str(token), "list")[0] == 2


def test_the_token_goes_to_no_stranger(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of a server that was killed may be another's by now."""
    server = make_server()
    server.start()
    server.kill()
    assert server.places.url.exists()
    with pytest.raises(ConfigError, match="no job server runs for"):
        Client.find(str(server.places.file))


def test_the_users_own_server(tmp_path: Path) -> None:
    """Without options: both find the file in the state folder."""
    (tmp_path / "server").mkdir()
    home = {"HOME": str(tmp_path), "XDG_STATE_HOME": ""}
    program = tmp_path / "program.py"
    program.write_text("print('it ran')")

    def run(*words: str) -> str:
        done = finished([*PGASDL, *words], env=environment(**home), timeout=60, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    server = Server(tmp_path / "server", file=tmp_path / ".local/state/pgasdl/jobs.db")
    command = [*PGASDL, "serve", f"--root={tmp_path}"]
    server.start(command, **home)
    try:
        job = run("job", "submit", "program.py").strip()
        assert run("job", "wait", job) == f"job {job} is done\n"
        assert run("job", "log", job) == "[0] it ran\n"
    finally:
        server.close()


def test_wrong_options_of_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = f"--file={tmp_path / 'jobs.db'}"
    for words, told in (
        ([file, f"--root={tmp_path / 'nothing'}"], "there is no such folder"),
        ([file, "--host=there.is.none.invalid"], "cannot listen at --host there.is.none.invalid"),
        ([file, "--host=node..cluster"], "cannot listen at --host node..cluster"),
        ([file, "--slots=0"], "--slots"),
        ([f"--file={tmp_path}"], "--file"),
        (["--file=/proc/nothing/jobs.db"], "--file"),
    ):
        assert main(["serve", *words]) == 2
        assert told in capsys.readouterr().err


def test_serve_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pgasdl.jobs.server", None)
    assert main(["serve"]) == 1
    assert "pip install 'pgasdl[jobs]'" in capsys.readouterr().err
    assert main(["serve", "--help"]) == 0
