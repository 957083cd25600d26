"""What jobs tell while they run, and what they are told, in the server's file."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable
from typing import Any

TABLES = """
CREATE TABLE IF NOT EXISTS metrics (
    job INTEGER NOT NULL REFERENCES jobs,
    name TEXT NOT NULL,
    iteration INTEGER NOT NULL,
    value REAL,
    time REAL NOT NULL,
    PRIMARY KEY (job, name, iteration)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ranks (
    job INTEGER NOT NULL REFERENCES jobs,
    rank INTEGER NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (job, rank)
) STRICT, WITHOUT ROWID;
"""
_COMMANDS = """
SELECT id, body FROM events WHERE job = ?1 AND kind = 'command' AND id > ?2
AND id > (SELECT max(id) FROM events WHERE job = ?1 AND kind = 'state') ORDER BY id LIMIT ?3
"""
# Of n points every step-th, counted from the last one, which is always there.
_POINTS = """
SELECT iteration, value, time FROM (
    SELECT *, row_number() OVER (ORDER BY iteration DESC) - 1 AS place, count(*) OVER () AS n
    FROM metrics WHERE job = ? AND name = ? AND iteration >= ?
) WHERE place % ((n + ?4 - 1) / ?4) = 0 ORDER BY iteration
"""


def note(database: sqlite3.Connection, job: int, kind: str, body: dict[str, Any]) -> int:
    """Write down an event, and return its number."""
    sql = "INSERT INTO events (job, time, kind, body) VALUES (?, ?, ?, ?)"
    number = database.execute(sql, (job, time.time(), kind, json.dumps(body))).lastrowid
    assert number is not None
    return number


def commands(database: sqlite3.Connection, job: int, after: int, limit: int) -> list[Any]:
    """Return commands to the present run of a job, with numbers above ``after``."""
    rows = database.execute(_COMMANDS, (job, after, limit)).fetchall()
    return [{"id": id, "command": json.loads(body)} for id, body in rows]


def add_metrics(database: sqlite3.Connection, job: int, messages: Iterable[Any]) -> None:
    """Write numbers down; those of an iteration that a job makes again replace the old ones."""
    database.executemany(
        "INSERT OR REPLACE INTO metrics (job, name, iteration, value, time) VALUES (?, ?, ?, ?, ?)",
        (
            (job, name, message["iteration"], number, message["time"])
            for message in messages
            for name, number in message["numbers"].items()
        ),
    )


def names(database: sqlite3.Connection, job: int, limit: int) -> list[str]:
    """Return the names of a job's metrics."""
    sql = "SELECT DISTINCT name FROM metrics WHERE job = ? ORDER BY name LIMIT ?"
    return [name for (name,) in database.execute(sql, (job, limit))]


def points(
    database: sqlite3.Connection, job: int, name: str, first: int, limit: int
) -> list[list[Any]]:
    """Return iteration, value and time of a metric, thinned to at most ``limit`` points."""
    return [list(row) for row in database.execute(_POINTS, (job, name, first, limit))]


def keep_counters(database: sqlite3.Connection, job: int, records: Iterable[Any]) -> None:
    """Keep the last counters of ranks."""
    database.executemany(
        "INSERT OR REPLACE INTO ranks (job, rank, body) VALUES (?, ?, ?)",
        ((job, record["rank"], json.dumps(record)) for record in records),
    )


def counters(database: sqlite3.Connection, job: int, first: int, limit: int) -> list[Any]:
    """Return the last counters of ranks, from one on."""
    sql = "SELECT body FROM ranks WHERE job = ? AND rank >= ? ORDER BY rank LIMIT ?"
    return [json.loads(body) for (body,) in database.execute(sql, (job, first, limit))]


def states(database: sqlite3.Connection) -> list[tuple[str, int]]:
    """Return how many jobs are in each state."""
    return database.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall()
