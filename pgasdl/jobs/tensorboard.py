"""A job's metrics as TensorBoard's event files, by TensorBoard's own writer.

A step is an iteration. A START event lets TensorBoard drop the points that it has: a job that was
started again repeats iterations, and a folder may be written again.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from pgasdl.errors import ConfigError, JobError, UnavailableError
from pgasdl.jobs.client import Client
from pgasdl.jobs.job import ENDED

_LOOK = 1.0  # seconds between two looks at a job that is followed
_PATIENCE = 30.0  # seconds for which a server that went away is looked for
_MOST_POINTS = 10_000  # of a metric in an answer

Point = tuple[int, float | None, float]  # iteration, value, time
Points = dict[str, list[Point]]  # by name


def write(client: Client, job: int, folder: Path, *, follow: bool = False) -> int:
    """Write a job's metrics into ``job-ID`` of a folder, and return how many points there were.

    Folders are made if they are not there. ``follow``: go on until the job
    ends. UnavailableError: TensorBoard is not installed. ConfigError: the folder cannot be written.
    JobError: there is no such job, or no server answers.
    """
    make = _Events()
    client.show(job)  # raises if there is no such job, before a file is made
    total = 0
    try:
        with contextlib.closing(make.writer(folder / f"job-{job}")) as writer:
            writer.add_event(make.start())
            for again, points in _looks(client, job, follow):
                if again:
                    writer.add_event(make.start())
                for name, series in points.items():
                    total += len(series)
                    for point in series:
                        writer.add_event(make.scalar(name, *point))
                writer.flush()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error
    return total


def _looks(client: Client, job: int, follow: bool) -> Iterator[tuple[bool, Points]]:
    """Yield new points, and whether they replace all before, until there are no more."""
    series, seen = _Series(client, job), time.monotonic()
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
    """A job's metrics, and how far they were read.

    Once another run of the job reports a metric, the server drops the points of later iterations
    that the run before had reported: then all is read again.
    """

    def __init__(self, client: Client, job: int) -> None:
        self.ended = False
        self._client, self._job = client, job
        self._started: float | None = None
        self._lasts: dict[str, Point] = {}  # of all that was read
        self._outdated: dict[str, Point] = {}  # the last of a run before, not reported again yet

    def look(self) -> tuple[bool, Points]:
        """Return new points, and whether they replace all that was read."""
        job = self._client.show(self._job)
        if job["started"] != self._started:
            self._started, self._outdated = job["started"], dict(self._lasts)
        lasts: dict[str, Point] = {}
        while found := self._client.metrics(self._job, after=max(lasts, default=""), points=1):
            lasts |= {name: tuple(point) for name, (point,) in found.items()}
        again = [name for name, last in self._outdated.items() if lasts.get(name) != last]
        again += [name for name, last in self._lasts.items() if lasts.get(name, (-1,))[0] < last[0]]
        for name in again:
            self._outdated.pop(name, None)
        if again:
            self._lasts = {}
        points = {
            name: series
            for name, last in lasts.items()
            if (series := list(self._between(name, self._lasts.get(name), last)))
        }
        self._lasts |= {name: series[-1] for name, series in points.items()}
        self.ended = job["state"] in ENDED
        return bool(again), points

    def _between(self, name: str, known: Point | None, last: Point) -> Iterator[Point]:
        """Yield points after one that is known, to the last one."""
        first = 0 if known is None else known[0] + 1
        while first <= last[0]:
            rows = self._client.metrics(
                self._job, name, first=first, points=_MOST_POINTS, thinned=False
            )[name]
            if not rows:
                return  # dropped meanwhile
            yield from map(tuple, rows)
            first = rows[-1][0] + 1


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

    def start(self) -> Any:
        """Make the event that lets TensorBoard drop the points that it has."""
        log = self._event.SessionLog(status=self._event.SessionLog.START)
        return self._event.Event(wall_time=time.time(), step=0, session_log=log)

    def scalar(self, name: str, step: int, value: float | None, wall_time: float) -> Any:
        """Make a point; None is a number that is not finite."""
        value = math.nan if value is None else value
        summary = self._summary.Summary(
            value=[self._summary.Summary.Value(tag=name, simple_value=value)]
        )
        return self._event.Event(wall_time=wall_time, step=step, summary=summary)
