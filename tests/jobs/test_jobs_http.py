"""What the server answers to those that ask rightly, wrongly, or too much."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import resource
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jobs_harness import Server, ask

from pgasdl.jobs import proof
from pgasdl.jobs.requests import MOST_BYTES
from pgasdl.jobs.server import _listening

JOBS = "/api/v1/jobs"
REQUEST = {"program": ["held.py"]}


def test_no_answer_waits_for_an_acknowledgement() -> None:
    """The system's delay of 40 ms: each answer is sent in two parts."""
    with (
        _listening("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# --- who may ask


@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic {}", "Bearer {}x", "Bearer {:.20}", "{}",
     "bearer {}", "Bearer \xe9"],
)  # fmt: skip
def test_a_wrong_token(shared: Server, given: str | None) -> None:
    header = None if given is None else given.format(shared.token)
    for method, path in (("GET", JOBS), ("POST", JOBS), ("GET", JOBS + "/1/log"), ("GET", "/x")):
        status, headers, told = ask(shared, method, path, Authorization=header)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert told["detail"] == "Unauthorized"  # and not why


def test_what_needs_no_token(shared: Server) -> None:
    for path in ("/livez", "/readyz", "/openapi.json"):
        assert ask(shared, "GET", path, Authorization=None)[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.2:5", 200),
        ("127.0.0.1.", 421),
        ("10.0.0.1", 421),
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:1", 200),
        ("elsewhere.example", 421),
        ("127.0.0.1.elsewhere.example:80", 421),
        ("", 421),
        ("[", 421),
    ],
)
def test_other_names_of_this_machine(shared: Server, host: str, status: int) -> None:
    """A page of another site cannot reach it by a name that it made to mean this machine."""
    for path in (JOBS, "/livez"):
        assert ask(shared, "GET", path, Host=host)[0] == status


def test_another_address_of_this_machine(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.options += ("--host=127.0.0.2",)
    assert server.start().jobs()["jobs"] == []


def test_a_signed_request_works_once_and_as_it_is(shared: Server) -> None:
    """Whoever relays or listens can change nothing, and repeat nothing."""
    body = json.dumps(REQUEST | {"ranks": 2}).encode()
    challenge, nonces = "-", iter("abcdefg")

    def sign(method: str = "POST", path: str = JOBS, body: bytes = body) -> str:
        parts = challenge, next(nonces) * 22
        signature = proof.signature(
            shared.token, "request", *parts, method, path, proof.digest(body)
        )
        return " ".join(("Pgasdl", *parts, proof.digest(body), signature))

    def post(signed: str, path: str = JOBS, body: bytes = body) -> tuple[int, str, Any]:
        given = {"Authorization": signed, "Content_Type": "application/json"}
        status, headers, told = ask(shared, "POST", path, body, **given)
        return status, headers["Pgasdl-Proof"], told

    status, told, _ = post(sign())
    challenge = told.split()[0]
    assert status == 401 and challenge != "-"
    before = len(shared.client.jobs(1000)["jobs"])
    signed = sign()
    assert post(signed)[0] == 201 and post(signed)[0] == 401  # not again
    for wrong in (sign("PUT"), sign(path=JOBS + "/1/stop"), sign(body=b"{}"), sign()[:-1] + "x"):
        assert post(wrong)[0] == 401
    assert post(sign(), path=JOBS + "?x=1")[0] == 401
    assert len(shared.client.jobs(1000)["jobs"]) == before + 1


def test_a_challenge_that_is_not_the_servers_any_more(
    shared: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port = shared.url.removeprefix("http://").rsplit(":", 1)
    connection = proof.Connection(host, int(port), shared.token, 30)
    for _ in range(2):
        connection.ask("GET", JOBS)
        assert connection.hear()[0].status == 200
        connection._challenge = "old"
    connection.close()
    monkeypatch.setattr(proof, "_MOST_NONCES", 2)
    challenges = proof.Challenges()
    first = challenges.now
    signed = [proof.Signed(first, nonce, "", "") for nonce in "abcd"]
    assert [challenges.meets(each) for each in (*signed[:2], *signed[:2])] == [True] * 2 + [
        False
    ] * 2
    second = challenges.now
    assert second != first and challenges.meets(signed[2]) and not challenges.meets(signed[2])
    for nonce in "ab":
        assert challenges.meets(proof.Signed(second, nonce, "", ""))
    assert not challenges.meets(signed[3])


def test_a_server_for_other_machines_warns(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.options += ("--host=0.0.0.0",)
    server.start()
    assert server.url.startswith("http://127.0.0.1:")
    assert ask(server, "GET", JOBS, Host="node7.cluster")[0] == 200
    assert ask(server, "GET", JOBS, Host="node7.cluster", Authorization=None)[0] == 401
    assert "HTTP is not encrypted" in server.end()


def test_only_its_user_reads_its_files(shared: Server) -> None:
    job = shared.submit()
    shared.ranks(job)
    places = shared.places
    files = [places.file, places.token, places.url, places.lock, places.job(job).parent]
    assert {file.stat().st_mode & 0o077 for file in files} == {0}
    shared.release(job)
    shared.client.wait(job)


# --- what is asked


def test_what_is_not_there(shared: Server) -> None:
    for path in ("/api", "/api/v1", "/api/v2/jobs", JOBS + "/", JOBS + "/x", JOBS + "/-1"):
        assert ask(shared, "GET", path)[0] == 404, path
    for number in ("0", "999999", "9" * 17, "9" * 400):
        for rest in ("", "/log", "/events"):
            assert ask(shared, "GET", f"{JOBS}/{number}{rest}")[0] == 404
        for rest in ("/stop", "/restart"):
            assert ask(shared, "POST", f"{JOBS}/{number}{rest}")[0] == 404


def test_methods(shared: Server) -> None:
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        status, headers, _ = ask(shared, method, JOBS)
        assert (status, set(headers["Allow"].split(", "))) == (405, {"GET", "POST"})
    assert ask(shared, "GET", JOBS + "/1/stop")[0] == 405
    assert ask(shared, "POST", "/livez")[0] == 405


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"program": ["held.py"], "ranks": NaN}', b'{"program": ["a"], "program": ["b"]}',
     b'{"program": ["\\ud800"]}', b"\xff\xfe{\x00}\x00", b"[" * 100_000,
     b'{"ranks": ' + b"9" * 5000],
)  # fmt: skip
def test_what_is_no_json(shared: Server, body: bytes) -> None:
    status, headers, told = ask(shared, "POST", JOBS, body, Content_Type="application/json")
    assert (status, headers["Content-Type"]) == (400, "application/problem+json")
    assert told["detail"].startswith("the body is no JSON")


def test_the_kind_of_a_body(shared: Server) -> None:
    text = json.dumps(REQUEST).encode()
    for kind in (None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"):
        assert ask(shared, "POST", JOBS, text, Content_Type=kind)[0] == 415
    wrong = b'{"ranks": 1}'
    assert (
        ask(shared, "POST", JOBS, wrong, Content_Type="Application/JSON; charset=utf-8")[0] == 422
    )
    assert ask(shared, "POST", JOBS + "/1/stop", {"now": 1})[0] == 422


def test_a_body_that_is_too_long(shared: Server) -> None:
    long = {"program": ["held.py", "x" * MOST_BYTES]}
    assert ask(shared, "POST", JOBS, long)[0] == 413
    pieces = iter([b" " * 65536] * (MOST_BYTES // 65536 + 1))  # chunked: its length is not told
    headers = {"Content_Type": "application/json", "Transfer_Encoding": "chunked"}
    host, port = shared.url.removeprefix("http://").rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    given = {name.replace("_", "-"): text for name, text in headers.items()}
    given["Authorization"] = f"Bearer {shared.token}"
    connection.request("POST", JOBS, pieces, given, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"program": []}, "program"),
        ({"program": "held.py"}, "program"),
        ({"program": ["held.py", 1]}, "program[1]"),
        ({"program": ["a\x00b"]}, "program[0]"),
        ({"program": ["-c", "print()"]}, "program[0]"),
        ({"program": ["-m"]}, "program"),
        ({"program": [""]}, "program[0]"),
        ({"program": ["there_is_none.py"]}, "program[0]"),
        ({"ranks": 0}, "ranks"),
        ({"ranks": 3}, "ranks"),  # the server has two slots
        ({"ranks": "2"}, "ranks"),
        ({"ranks": True}, "ranks"),
        ({"ranks": None}, "ranks"),
        ({"ranks": 1.5}, "ranks"),
        ({"restarts": -1}, "restarts"),
        ({"grace": 3601}, "grace"),
        ({"name": "line\nline"}, "name"),
        ({"name": "x" * 101}, "name"),
        ({"name": "\x9b31m"}, "name"),
        ({"slots": 2}, "slots"),
        ({"environment": {"A=B": "1"}}, "environment.A=B"),
        ({"environment": {"1A": ""}}, "environment.1A"),
        ({"environment": {"A\n": ""}}, "environment.A\n"),
        ({"environment": {"A": 1}}, "environment.A"),
        ({"environment": {"A": "\x00"}}, "environment.A"),
        ({"environment": {"PGASDL_RANK": "0"}}, "environment.PGASDL_RANK"),
        ({"environment": {"PGASDL_SECRET_FD": "3"}}, "environment.PGASDL_SECRET_FD"),
        ({"environment": {"PGASDL_JOB_FOLDER": "/"}}, "environment.PGASDL_JOB_FOLDER"),
        ({"environment": {"PGASDL_TRANSPRT": "shm"}}, "environment.PGASDL_TRANSPRT"),
        ({"environment": {"PGASDL_TIMEOUT": "soon"}}, "environment.PGASDL_TIMEOUT"),
        ({"stage": {}}, "stage.remote"),
        ({"stage": {"remote": ["a"]}}, "stage.local"),
        ({"stage": {"remote": [], "local": "b"}}, "stage.remote"),
        ({"stage": {"remote": ["a"], "local": "b", "to": "c"}}, "stage.to"),
        ({"stage": {"remote": ["a"], "local": "b", "format": "--x"}}, "stage.format"),
        ({"stage": None}, "stage"),
    ],
)
def test_a_wrong_field_is_named(shared: Server, change: dict[str, Any], field: str) -> None:
    before = ask(shared, "GET", JOBS)[2]
    status, _, told = ask(shared, "POST", JOBS, REQUEST | change)
    assert (status, told["field"]) == (422, field), told
    assert told["detail"].startswith(field)
    assert ask(shared, "GET", JOBS)[2] == before


@pytest.mark.parametrize(
    ("query", "field"),
    [("limit=0", "limit"), ("limit=1001", "limit"), ("limit=x", "limit"), ("limit=-1", "limit"),
     ("limit=1&limit=2", "limit"), ("before=0", "before"), ("state=gone", "state"),
     ("page=2", "page"), ("limit=%D9%A3", "limit")],
)  # fmt: skip
def test_a_wrong_parameter_is_named(shared: Server, query: str, field: str) -> None:
    status, _, told = ask(shared, "GET", f"{JOBS}?{query}")
    assert (status, told["field"]) == (422, field)


# --- paths


@pytest.fixture
def outside(shared: Server) -> Path:
    """A folder beside the root, to which links lead out of it."""
    outside = shared.root.parent / "outside"
    if not outside.exists():
        outside.mkdir()
        (outside / "held.py").write_bytes((shared.root / "held.py").read_bytes())
        (shared.root / "inner").mkdir()
        (shared.root / "inner/held.py").symlink_to("../held.py")  # it stays inside
        (shared.root / "link").symlink_to(outside)
        (shared.root / "link.py").symlink_to(outside / "held.py")
        (shared.root / "circle").symlink_to("circle")
        (shared.root.parent / "rootless").mkdir()  # its name begins like the root's
    return outside


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"folder": ".."}, "folder"),
        ({"folder": "/"}, "folder"),
        ({"folder": "inner/../.."}, "folder"),
        ({"folder": "link"}, "folder"),
        ({"folder": "circle"}, "folder"),
        ({"folder": "../rootless"}, "folder"),
        ({"folder": "held.py"}, "folder"),
        ({"folder": "x" * 300}, "folder"),
        ({"program": ["../outside/held.py"]}, "program[0]"),
        ({"program": ["/etc/passwd"]}, "program[0]"),
        ({"program": ["link/held.py"]}, "program[0]"),
        ({"program": ["link.py"]}, "program[0]"),
        ({"program": ["circle"]}, "program[0]"),
        ({"stage": {"remote": ["x"], "local": "../out"}}, "stage.local"),
        ({"stage": {"remote": ["x"], "local": "link/out"}}, "stage.local"),
        ({"stage": {"remote": ["x"], "local": "/tmp"}}, "stage.local"),
    ],
)
def test_no_path_leads_out_of_the_root(
    shared: Server, outside: Path, change: dict[str, Any], field: str
) -> None:
    status, _, told = ask(shared, "POST", JOBS, REQUEST | change)
    assert (status, told["field"]) == (422, field), told


def test_a_link_that_stays_inside(shared: Server, outside: Path) -> None:
    job = shared.submit("held.py", folder=str(shared.root / "inner"))
    shared.ranks(job)
    shared.release(job)
    assert shared.client.wait(job)["state"] == "done"


# --- how much


def test_pages(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.start()
    first = server.submit(ranks=2)
    server.ranks(first, 2)
    rest = [server.submit(name=f"job {number}") for number in range(4)]
    client = server.client
    page = client.jobs(2)
    assert [job["id"] for job in page["jobs"]] == [5, 4] and page["next"] == 4
    page = client.jobs(2, page["next"])
    assert [job["id"] for job in page["jobs"]] == [3, 2] and page["next"] == 2
    page = client.jobs(2, page["next"])
    assert [job["id"] for job in page["jobs"]] == [1] and page["next"] is None
    assert [job["id"] for job in client.jobs(state="queued")["jobs"]] == rest[::-1]
    assert client.jobs(state="done")["jobs"] == []
    assert page["jobs"][0]["name"] == "held.py" and client.show(3)["name"] == "job 1"


def test_fifty_clients_at_once(shared: Server) -> None:
    """Each submits a job, follows it, and stops it; the slots are taken."""
    first = shared.submit(ranks=2)
    shared.ranks(first, 2)

    def one(_: int) -> tuple[int, list[str]]:
        client = shared.client
        job = client.submit(["held.py"])["id"]
        events = client.events(job)
        seen = [next(events)["state"]]
        assert client.stop(job)["state"] == "stopped"
        seen += [event["state"] for event in events if event["event"] == "state"]
        assert client.show(job)["state"] == "stopped"
        return job, seen

    with ThreadPoolExecutor(50) as pool:
        found = list(pool.map(one, range(50)))
    assert sorted(job for job, _ in found) == list(range(first + 1, first + 51))
    assert {tuple(seen) for _, seen in found} == {("queued", "stopped")}
    shared.release(first)
    assert shared.client.wait(first)["state"] == "done"


def test_strangers_that_say_nothing_hold_nothing_up(shared: Server) -> None:
    host, port = shared.url.removeprefix("http://").rsplit(":", 1)
    silent = [socket.create_connection((host, int(port)), timeout=30) for _ in range(50)]
    for number, connection in enumerate(silent):
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: "[: number % 25])
    assert ask(shared, "GET", "/readyz")[2] == {"status": "ready"}
    silent[0].sendall(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")  # TLS
    assert silent[0].recv(100).startswith(b"HTTP/1.1 400")
    for connection in silent:
        connection.close()


def test_more_strangers_than_descriptors(server: Server) -> None:
    """They keep out neither clients nor jobs, and fill no log."""
    assert server.process is not None
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (512, 512))
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    strangers = [socket.create_connection((host, int(port)), timeout=30) for _ in range(600)]
    for stranger in strangers:
        with contextlib.suppress(OSError):  # others took its place
            stranger.sendall(b"GET / HTTP/1.1\r\nX: ")
    job = server.submit(ranks=2)
    server.ranks(job, 2)
    server.release(job)
    assert server.client.wait(job)["state"] == "done"
    for stranger in strangers:
        stranger.close()
    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=30) as stranger:
            stranger.sendall(b"nonsense\r\n\r\n")
            assert stranger.recv(100).startswith(b"HTTP/1.1 400")
    assert server.end() == "pgasdl serve: Invalid HTTP request received.\n"


@pytest.mark.full
def test_half_a_request_is_not_waited_for(shared: Server) -> None:
    host, port = shared.url.removeprefix("http://").rsplit(":", 1)
    for whole in (b"", b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=60) as stranger:
            stranger.sendall(whole + b"GET /livez HTTP/1.1\r\n")
            while stranger.recv(1000):
                pass


# --- what it says of itself


def test_the_description_tells_what_is_open(shared: Server) -> None:
    paths = ask(shared, "GET", "/openapi.json")[2]["paths"].items()
    for path, methods in paths:
        for method, operation in methods.items():
            is_open = not operation["security"]
            status = ask(shared, method.upper(), re.sub("{id}", "1", path), Authorization=None)[0]
            assert status == (200 if is_open else 401)
