"""Reports of jobs while they run, and commands to them, in the server's file."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from pgasdl.jobs.requests import LARGEST

Point = tuple[int, float | None, float]  # iteration, value (None: not finite), time

TABLES = """
CREATE TABLE IF NOT EXISTS metrics (
    job INTEGER NOT NULL REFERENCES jobs,
    name TEXT NOT NULL,
    iteration INTEGER NOT NULL,
    value REAL,
    time REAL NOT NULL,
    step INTEGER NOT NULL,
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
# It goes from each name to the next, instead of looking at all points.
_NAMES = """
WITH RECURSIVE names(name) AS (
    SELECT min(name) FROM metrics WHERE job = ?1 AND name > ?3
    UNION ALL
    SELECT (SELECT min(name) FROM metrics WHERE job = ?1 AND name > names.name) FROM names
    WHERE name IS NOT NULL
) SELECT name FROM names WHERE name IS NOT NULL LIMIT ?2
"""
_POINTS = """
SELECT iteration, value, time FROM metrics WHERE job = ? AND name = ? AND iteration BETWEEN ? AND ?
"""

_OUTDATED = """
DELETE FROM metrics WHERE job = ?1 AND name = ?2 AND iteration > ?3
AND step < (SELECT step FROM jobs WHERE id = ?1)
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
    """Write numbers down; a job that was started again replaces its points from there on."""
    rows = [
        (job, name, message["iteration"], _float(number), _float(message["time"]))
        for message in messages
        for name, number in message["numbers"].items()
    ]
    firsts: dict[str, int] = {}
    for _, name, iteration, *_ in rows:
        firsts[name] = min(iteration, firsts.get(name, iteration))
    database.executemany(_OUTDATED, [(job, name, first) for name, first in firsts.items()])
    database.executemany(
        "INSERT OR REPLACE INTO metrics (job, name, iteration, value, time, step)"
        " VALUES (?1, ?2, ?3, ?4, ?5, (SELECT step FROM jobs WHERE id = ?1))",
        rows,
    )


def _float(number: float | None) -> float | None:
    return None if number is None else float(number)  # SQLite takes no integer beyond 64 bits


def names(database: sqlite3.Connection, job: int, limit: int, after: str = "") -> list[str]:
    """Return names of a job's metrics, in order, those after one."""
    return [name for (name,) in database.execute(_NAMES, (job, limit, after))]


def points(
    database: sqlite3.Connection, job: int, name: str, first: int, limit: int
) -> list[Point]:
    """Return iteration, value and time of a metric, the first ones from an iteration on."""
    sql = f"{_POINTS} ORDER BY iteration LIMIT ?"
    return database.execute(sql, (job, name, first, LARGEST, limit)).fetchall()


def thinned(
    database: sqlite3.Connection, job: int, name: str, first: int, limit: int
) -> list[Point]:
    """Return all points, or of more than ``limit`` the last one of each of so many equal parts."""
    found = points(database, job, name, first, limit + 1)
    if len(found) <= limit:
        return found
    begin, end = found[0][0] - 1, last(database, job, name)[0]
    edges = [begin + (end - begin) * part // limit for part in range(limit + 1)]
    sql = f"{_POINTS} ORDER BY iteration DESC LIMIT 1"
    return [
        row
        for before, edge in pairwise(edges)
        for row in database.execute(sql, (job, name, before + 1, edge))
    ]


def last(database: sqlite3.Connection, job: int, name: str) -> Point:
    """Return the last point of a metric that there is."""
    sql = f"{_POINTS} ORDER BY iteration DESC LIMIT 1"
    found: Point = database.execute(sql, (job, name, 0, LARGEST)).fetchone()
    return found


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
