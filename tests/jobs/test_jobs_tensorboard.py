"""``pgasdl job tensorboard``: what TensorBoard reads back."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from jobs_harness import Server, kill_and_see_it_gone
from support.patience import PATIENCE, until
from support.requiring import require_modules

from pgasdl.jobs import tensorboard
from pgasdl.jobs.link import Link
from pgasdl.jobs.messages import Metrics
from pgasdl.tools.cli import main

Read = dict[str, list[tuple[int, float, float]]]


def tell(server: Server, job: int, messages: Iterable[Metrics]) -> None:
    """Send metrics as the present run of a job."""
    link = Link(server.places.link(job), lambda: None)
    for message in messages:
        link.tell(message)
    link.close()


def command(server: Server, job: int, folder: Path, *options: str) -> int:
    words = ["tensorboard", str(job), str(folder), *options]
    return main(["job", f"--server={server.places.file}", *words])


def read(folder: Path) -> Read:
    """Step, value and time of each tag's points."""
    require_modules("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {
        tag: [(point.step, point.value, point.wall_time) for point in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def test_all_points_are_there(
    shared: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those that are not finite, too; and once, if the folder is written again, or by two jobs."""
    require_modules("tensorboard")
    monkeypatch.setattr(tensorboard, "_MOST_POINTS", 1000)
    job = shared.submit()
    shared.ranks(job)
    folder, other = tmp_path / "new/events", shared.submit()
    points = folder / f"job-{job}"
    assert command(shared, job, folder) == 0 and read(points) == {}
    steps = [*range(3000), 10**6, 2**53 - 1]
    tell(shared, job, (Metrics(step, 1e9 + step / 4, {"loss": 1 / (step + 1)}) for step in steps))
    tell(shared, job, [Metrics(7, 3.0, {"of/test": math.inf}), Metrics(8, 4.0, {"of/test": 2})])
    names = [f"m{number}" for number in range(250)]  # more than one answer has
    tell(
        shared,
        job,
        [
            Metrics(1, 1.0, dict.fromkeys(part, 5))
            for part in (names[:90], names[90:180], names[180:])
        ],
    )
    for _ in range(2):
        capsys.readouterr()
        assert command(shared, job, folder) == 0
        assert capsys.readouterr().out == f"3254 points: tensorboard --logdir {folder}\n"
        assert command(shared, other, folder) == 0
        there = read(points)
        assert [there.pop(name) for name in names] == [[(1, 5.0, 1.0)]] * 250
        loss = [(step, float(np.float32(1 / (step + 1))), 1e9 + step / 4) for step in steps]
        assert there.pop("loss") == loss
        (seventh, eighth) = there.pop("of/test")
        assert seventh[0] == 7 and math.isnan(seventh[1]) and eighth == (8, 2.0, 4.0)
        assert not there


def test_a_job_that_is_followed_and_started_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the second run makes again replaces the first one's, also for who comes in between."""
    require_modules("tensorboard")
    monkeypatch.setattr(tensorboard, "_LOOK", 0.01)

    def told(first: int, last: int, began: float) -> None:
        messages = (Metrics(at, began + at, {"loss": began + at}) for at in range(first, last))
        tell(server, job, [*messages, Metrics(last - 1, began + last - 0.5, {"test": began})])

    def points(first: int, last: int, began: float) -> list[tuple[int, float, float]]:
        return [(at, began + at, began + at) for at in range(first, last)]

    job = server.submit(restarts=1)
    (rank,) = server.ranks(job)
    before, between = (tmp_path / name / f"job-{job}" for name in ("before", "between"))
    with ThreadPoolExecutor() as pool:

        def followed(folder: Path) -> Future[int]:
            return pool.submit(command, server, job, folder.parent, "--follow")

        ends = [followed(before)]
        told(0, 5, 100)
        told(5, 10, 100)
        there: Read = {"loss": points(0, 10, 100), "test": [(4, 100, 104.5), (9, 100, 109.5)]}
        assert until(lambda: before.exists() and read(before) == there), read(before)
        server.kill()
        server.start()
        kill_and_see_it_gone(rank)
        server.ranks(job, 2)
        told(5, 7, 200)
        there = {
            "loss": [*points(0, 5, 100), *points(5, 7, 200)],
            "test": [(4, 100, 104.5), (6, 200, 206.5)],
        }
        assert until(lambda: read(before) == there), read(before)
        ends.append(followed(between))
        assert until(lambda: between.exists() and read(between) == there), read(between)
        told(7, 8, 200)
        server.release(job)
        assert [end.result(PATIENCE) for end in ends] == [0, 0]
    there = {
        "loss": [*there["loss"], *points(7, 8, 200)],
        "test": [*there["test"], (7, 200, 207.5)],
    }
    assert read(before) == read(between) == there


def test_what_is_refused(
    shared: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_modules("tensorboard")
    job = shared.submit()
    (tmp_path / "file").write_text("")
    folder = tmp_path / "folder"
    assert command(shared, 999, folder) == 1
    assert "there is no job 999" in capsys.readouterr().err
    assert command(shared, job, tmp_path / "file") == 2
    assert "file cannot be written" in capsys.readouterr().err
    assert not folder.exists()


def test_without_tensorboard(
    shared: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    assert command(shared, shared.submit(), tmp_path / "folder") == 1
    assert "pip install tensorboard" in capsys.readouterr().err
    assert not (tmp_path / "folder").exists()
