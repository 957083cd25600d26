"""A job's metrics as TensorBoard's event files, by TensorBoard's own writer.

A step is an iteration. A START event lets TensorBoard forget what it has from a step on: where a
job that was started again makes iterations once more, and in a folder that is written again.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from pgasdl.errors import ConfigError, JobError, UnavailableError
from pgasdl.jobs.client import Client
from pgasdl.jobs.job import ENDED

_LOOK = 1.0  # seconds between two looks at a job that is followed
_PATIENCE = 30.0  # seconds for which a server that went away is looked for
_MOST_POINTS = 10_000  # of a metric in an answer

Point = tuple[int, float, float]  # iteration, value, time
Points = dict[str, list[Point]]  # by name

_NONE: Point = (0, 0.0, -math.inf)


def write(client: Client, job: int, folder: Path, *, follow: bool = False) -> int:
    """Write a job's metrics into a folder, and return how many points there were.

    Parameters
    ----------
    client : Client
        Of the job's server.
    job : int
        The job.
    folder : Path
        Of this job alone; made if it is not there.
    follow : bool, default False
        Go on until the job ends.

    Raises
    ------
    UnavailableError
        TensorBoard is not installed.
    ConfigError
        The folder cannot be written.
    JobError
        There is no such job, or no server answers.
    """
    make = _Events()
    client.show(job)  # no file for a job that there is not
    total = 0
    try:
        with contextlib.closing(make.writer(folder)) as writer:
            writer.add_event(make.start(0))
            for first, points in _looks(client, job, follow):
                if first is not None:
                    writer.add_event(make.start(first))
                for name, series in points.items():
                    total += len(series)
                    for point in series:
                        writer.add_event(make.scalar(name, *point))
                writer.flush()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error
    return total


def _looks(client: Client, job: int, follow: bool) -> Iterator[tuple[int | None, Points]]:
    """Yield what is new, with the first iteration that is made again, until there is no more."""
    series, seen = _Series(client, job, follow), time.monotonic()
    while True:
        try:
            yield series.look()
            seen = time.monotonic()
        except JobError as error:
            if error.status or not follow or time.monotonic() > seen + _PATIENCE:
                raise
        if series.ended or not follow:
            return
        time.sleep(_LOOK)


class _Series:
    """How far a job's metrics were read.

    Another run of a job replaces the points of the one before, one after another. What it has not
    made again yet is older than what it has made.
    """

    def __init__(self, client: Client, job: int, follow: bool) -> None:
        self.ended = False
        self._client, self._job, self._joins = client, job, follow
        self._started: float | None = None
        self._waits = False  # for the first points of another run
        self._next: dict[str, int] = {}  # the first iteration that was not read, by name
        self._first = 0  # no name has anything new before this iteration
        self._newest = self._before = -math.inf  # times: of all that was read, of earlier runs

    def look(self) -> tuple[int | None, Points]:
        """Read what is new, and the first iteration that another run has made again, or None."""
        now = self._client.show(self._job)
        if now["started"] not in (None, self._started):
            self._started = now["started"]
            if self._newest > -math.inf:
                self._waits, self._before = True, self._newest
                self._next, self._first = {}, 0
        again, (last, points) = None, self._read()
        if points and self._waits:
            last, points = self._read()  # its first report is there whole by now
            again = min(series[0][0] for series in points.values())
            self._waits = False
        self._first = max(self._first, last, again or 0)
        self._newest = max([self._newest, *(time for _, _, time in _all(points))])
        if self._joins:
            points, self._joins = self._without_old(points), False
        self._next |= {name: series[-1][0] + 1 for name, series in points.items()}
        self.ended = now["state"] in ENDED
        return again, points

    def _read(self) -> tuple[int, Points]:
        """Return the last iteration that there was before, and what is new."""
        there = self._client.metrics(self._job, first=self._first, points=1)
        lasts = [(name, *point) for name, points in there.items() for point in points]
        found = {
            name: series
            for name, last, _, _ in lasts
            if last >= (first := self._next.get(name, self._first))
            and (series := self._of(name, first))
        }
        return max((last for _, last, _, at in lasts if at > self._before), default=0), found

    def _of(self, name: str, first: int) -> list[Point]:
        rows = self._client.metrics(self._job, name, first=first, points=_MOST_POINTS)[name]
        return [
            (iteration, math.nan if value is None else value, time)
            for iteration, value, time in rows
            if time > self._before
        ]

    def _without_old(self, points: Points) -> Points:
        """Leave out what the present run will make again, if it is not the first."""
        last, _, newest = max(_all(points), key=lambda point: point[2], default=_NONE)
        if any(point[0] > last for point in _all(points)):
            self._before, self._first = newest, 0
        return {
            name: kept
            for name, series in points.items()
            if (kept := [point for point in series if point[0] <= last])
        }


def _all(points: Points) -> Iterator[Point]:
    return chain.from_iterable(points.values())


class _Events:
    """TensorBoard's own classes."""

    def __init__(self) -> None:
        try:
            self._files = import_module("tensorboard.summary.writer.event_file_writer")
            self._event = import_module("tensorboard.compat.proto.event_pb2")
            self._summary = import_module("tensorboard.compat.proto.summary_pb2")
        except ImportError as error:
            raise UnavailableError(
                f"event files need TensorBoard: pip install tensorboard ({error})"
            ) from error

    def writer(self, folder: Path) -> Any:
        """Make a file in a folder."""
        return self._files.EventFileWriter(str(folder))

    def start(self, step: int) -> Any:
        """Let TensorBoard forget what it has from a step on."""
        log = self._event.SessionLog(status=self._event.SessionLog.START)
        return self._event.Event(wall_time=time.time(), step=step, session_log=log)

    def scalar(self, name: str, step: int, value: float, wall_time: float) -> Any:
        """Make a point."""
        summary = self._summary.Summary(
            value=[self._summary.Summary.Value(tag=name, simple_value=value)]
        )
        return self._event.Event(wall_time=wall_time, step=step, summary=summary)
