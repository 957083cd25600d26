"""What those who watch are told: of all jobs, of ranks, and of what a failed job left."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs_harness import Server, ask
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from support.patience import PATIENCE, until

import pgasdl
from pgasdl import loopback
from pgasdl.counters import Counters, LayerTimes, Traffic, Waits
from pgasdl.jobs import board
from pgasdl.jobs.board import Board
from pgasdl.jobs.messages import COUNTERS, RankCounters
from pgasdl.jobs.schema import check

FOR_EVER = str(10**9)


@contextmanager
def watching(server: Server) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    """The server-sent events of all jobs, from now on."""
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
    connection.request("GET", "/api/v1/events", headers={"Authorization": f"Bearer {server.token}"})
    answer = connection.getresponse()

    def events() -> Iterator[tuple[str, dict[str, Any]]]:
        kind = ""
        while line := answer.readline().decode():
            name, _, text = line.rstrip("\n").partition(": ")
            if name == "event":
                kind = text
            elif name == "data":
                yield kind, json.loads(text)

    try:
        yield events()
    finally:
        connection.close()


def families(server: Server) -> dict[str, Any]:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {server.token}"})
    answer = connection.getresponse()
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    text = answer.read().decode()
    connection.close()
    return {family.name: family.samples for family in text_string_to_metric_families(text)}


def test_a_job_that_trains_is_watched(server: Server) -> None:
    with watching(server) as events:
        assert next(events) == ("now", {})
        job = server.submit("obeys.py", "exchange", FOR_EVER, ranks=2)
        seen: list[tuple[str, dict[str, Any]]] = []
        while not any(kind == "news" and told["reports"] > 1 for kind, told in seen):
            seen.append(next(events))
        states = [told["state"] for kind, told in seen if kind == "state"]
        assert states == ["queued", "running"] and {told["job"] for _, told in seen} == {job}
        # Rank 1 has no connection: rank 0 reads what it counts.
        assert until(lambda: len(server.client.ranks(job)) == 2, PATIENCE)
        before = server.client.ranks(job)
        assert until(lambda: all(
            now["iteration"] > then["iteration"]
            for now, then in zip(server.client.ranks(job), before, strict=True)
        ), PATIENCE)  # fmt: skip
        for rank, told in enumerate(server.client.ranks(job)):
            check(told, COUNTERS)
            assert told["rank"] == rank and told["memory"] > 1 << 20
            found = RankCounters.from_json(told).counters
            layer = found.layers[0, 0]
            assert layer.exchanges > 0 and layer.computing > 0
            assert found.peers[1 - rank].notifications > 0
        assert server.client.ranks(job, first=1) == server.client.ranks(job)[1:]
        scraped = families(server)
        assert [(each.labels, each.value) for each in scraped["pgasdl_jobs"]] == [
            ({"state": "running"}, 1.0)
        ]
        assert scraped["pgasdl_slots"][0].value == 2
        iterations = {each.labels["rank"]: each.value for each in scraped["pgasdl_rank_iteration"]}
        assert set(iterations) == {"0", "1"} and min(iterations.values()) > 0
        states = {each.labels["state"] for each in scraped["pgasdl_layer_seconds"]}
        assert states == {"computing", "queued", "exchanging", "waiting"}
        (metric,) = scraped["pgasdl_job_metric"]
        assert metric.labels == {"job_id": str(job), "name": "iteration"} and metric.value > 0
        server.client.send(job, "stop")
        told = next(told for kind, told in events if kind == "command")
        assert told["name"] == "stop"
        assert next(told for kind, told in events if kind == "state")["state"] == "done"
    assert "pgasdl_rank_iteration" in (after := families(server))
    assert after["pgasdl_rank_iteration"] == []
    told = ask(server, "GET", f"/api/v1/jobs/{job}/history")[2]
    assert [each["event"] for each in told["events"][:2]] == ["state", "state"]
    assert told["events"][-1]["state"] == "done"
    assert told["log"] == server.places.log(job).stat().st_size
    # Counters stay.
    assert [each["rank"] for each in server.client.ranks(job)] == [0, 1]


def test_the_flight_record_of_a_failed_job(server: Server) -> None:
    job = server.submit("fails.py", ranks=2)
    assert server.client.wait(job)["state"] == "failed"
    (record,) = server.client.records(job)
    assert record["name"].endswith("-rank-0.txt")
    assert record["text"].startswith("flight record, after PeerLostError")
    assert "plan_start" in record["text"]
    assert server.client.records(server.submit()) == []


def test_what_a_program_puts_in_the_place_of_its_files(server: Server, tmp_path: Path) -> None:
    """A pipe has no end, and keeps no thread of the server."""
    job = server.submit()
    server.ranks(job)
    records, log = server.places.records(job), server.places.log(job)
    os.mkfifo(records / "x.txt")
    (records / "y.txt").symlink_to(records / "x.txt")
    (records / "z.txt").write_bytes(b"a record of \xff")
    log.unlink()
    for file in (log, server.places.link(job).with_name("new")):
        os.mkfifo(file)
    file.rename(server.places.link(job))
    assert [record["text"] for record in server.client.records(job)] == ["a record of \ufffd"]
    assert server.client.log(job) == b""
    assert ask(server, "GET", f"/api/v1/jobs/{job}/commands")[0] == 401


def test_what_a_rank_counts_is_whole_or_not_there() -> None:
    """As JSON and back; too long to keep; and changed while it was read."""
    layers = {(0, layer): LayerTimes(7, 1.5, 0.25, 0.5, 0.125) for layer in range(2000)}
    peers = (Traffic(), Traffic(1, 2, 3, 4, 5))
    counters = Counters(peers, 9, {"plan": Waits(3, 0.5)}, 1, layers)
    told = RankCounters(1, 5, 1.0, 4096, counters)
    document = told.as_json()
    check(document, COUNTERS)
    assert RankCounters.from_json(document) == told

    def rank(ctx: pgasdl.Context) -> None:
        own = Board(ctx, ctx.world)
        (segment, data) = own._segment, own._bytes
        if ctx.rank == 1:
            own._keep(board._encoded(dict(document)))
        ctx.barrier()
        if ctx.rank == 0:
            own._ask()
            ctx.wait(own._queue)
            (kept,) = own._taken()
            assert kept["rank"] == 1 and 0 < len(kept["layers"]) < 2000
            assert kept["peers"] == document["peers"]
            own._ask()
            ctx.wait(own._queue)
            data[board._BYTES + 100] ^= 1
            assert list(own._taken()) == []
        ctx.barrier()
        assert segment.nbytes == board._BYTES * (2 - ctx.rank)

    loopback.run(2, rank)


def test_a_board_of_many_ranks_is_read_by_turns() -> None:
    def rank(ctx: pgasdl.Context) -> None:
        own = Board(ctx, ctx.world)
        list(own.look(ctx.rank, last=True))
        ctx.barrier()
        if ctx.rank == 0:
            seen = set()
            for _ in range(2):
                own._ask()
                ctx.wait(own._queue)
                seen |= {(each["rank"], each["iteration"]) for each in own._taken()}
            assert seen == {(rank, rank) for rank in range(1, 20)}
        ctx.barrier()

    loopback.run(20, rank)
