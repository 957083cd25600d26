"""A network learns pictures: several ranks train as one process, to the same bits anywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from support import launcher
from support.places import APPS
from tiers import full

pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("PIL")

import pictures
from image_tools import DATA, Course, Team, as_before, digests, given, same  # noqa: F401
from PIL import Image

from pgasdl import loopback
from pgasdl.errors import DataError

SHORT = "--iterations 3 --batch 4"
UNMAPPED = {"mapped": False, "seed": 1, "delay": 1, "reorder": True, "late_source": True}


def alone(arguments: str) -> Course:
    """One process's course, a plain PyTorch loop."""
    course = Course(given(arguments))
    course.train(Team())
    return course


def trained(size: int, arguments: str, until: int | None = None, **transport: Any) -> list[Course]:
    """Every rank's course; the ranks are threads."""
    parsed = given(arguments)

    def program(ctx: Any) -> Course:
        course, team = Course(parsed), Team(ctx, plan=parsed.plan)
        course.train(team, until=until)
        course.common_digest(team)
        return course

    return loopback.run(size, program, **transport)


@pytest.mark.gate
def test_the_program_tells_all_ranks_where_the_pictures_are() -> None:
    done = launcher.run("-n", "2", str(APPS / "train_images.py"), *SHORT.split(), timeout=100)
    assert re.search(r"sha256 \w{16}, the same bits on 2 ranks", done.stdout), done.stderr


@pytest.mark.parametrize("size", full([3, 2, 4], quick=1))
def test_ranks_train_the_network_of_one_process(size: int) -> None:
    """In double precision, where an error that is no rounding stands out."""
    arguments = f"{SHORT} --dtype float64"
    one = alone(arguments)
    for course in trained(size, arguments):
        same(course, one)
        np.testing.assert_allclose(course.losses, one.losses, rtol=0, atol=1e-11)


@pytest.mark.full
def test_the_loss_falls_alike_in_single_precision(pictures_folder: Path) -> None:
    one = alone("")
    assert np.mean(one.losses[-5:]) < one.losses[0] / 2
    accuracy, count = one.accuracy(str(pictures_folder / "test"))
    assert count == 125 and accuracy > 0.5  # of ten classes
    for size in (2, 3):
        losses = trained(size, "", until=60)[0].losses
        np.testing.assert_allclose(losses, one.losses[:60], rtol=0, atol=0.05)


@pytest.mark.parametrize("size", full([2, 3]))
def test_the_same_bits_on_every_transport_and_in_every_run(size: int, tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    program = APPS / "train_images.py"
    out = jobs.run(size, program, *DATA, *SHORT.split(), "--picture", str(picture))
    assert out.count("[0] iteration 3 of 3\n") == 2  # and once more in one process
    (over_shm,) = digests(out)
    assert f"the same bits on {size} ranks" in out
    read = re.search(r"([\d.]+) MB read from storage for \d ranks; .* ([\d.]+) MB", out)
    assert read is not None and read[1] == read[2]  # once for all
    differ = re.search(r"the losses differ by at most ([\d.e+-]+)", out)
    assert differ is not None and float(differ[1]) < 1e-3
    assert picture.stat().st_size > 20_000
    for transport in ({}, UNMAPPED):
        for course in trained(size, SHORT, **transport):
            assert course.digest()[:16] == over_shm


@pytest.mark.full
@pytest.mark.parametrize("plan", ["gdraa", "gdraa-direct", "tree", "staged", "ring"])
def test_the_same_bits_of_every_plan(plan: str) -> None:
    """Courses of two ranks: there is one order only in which two numbers can be added."""
    bits = {course.digest() for course in trained(2, f"{SHORT} --plan {plan}")}
    assert bits == {trained(2, SHORT)[0].digest()}


def test_the_pictures_are_the_same_each_time(pictures_folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    pictures.make(again)
    files = sorted(path.relative_to(again) for path in again.rglob("*.tar"))
    assert len(files) == 2 * len(pictures.PICTURES)
    for file in files:
        assert (again / file).read_bytes() == (pictures_folder / file).read_bytes()


def test_the_pictures_are_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "PICTURES", (pictures.PICTURES[0], "skimage/data/none.png"))
    with pytest.raises(FileNotFoundError):
        pictures.make(tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_folder_of_other_pictures_is_taken(tmp_path: Path) -> None:
    """Of any size, and with transparency; what is no picture is named."""
    for label, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        for k in range(2):
            picture = Image.new("RGBA", (40 + k, 50), (100 * label, 20, 30, 255))
            picture.save(tmp_path / name / f"{k}.png")
    course = alone(f"--data {tmp_path} --classes 2 --pixels 32 --batch 4 --iterations 3")
    assert len(course.losses) == 3
    assert course.accuracy(str(tmp_path))[1] == 4
    (tmp_path / "a" / "0.png").rename(tmp_path / "a" / "0.bmp")
    with pytest.raises(DataError, match=r"record 0 .*no jpg, jpeg or png among __key__, bmp, cls"):
        course.accuracy(str(tmp_path))
