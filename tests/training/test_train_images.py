"""A network of ImageNet's shape: several ranks train as one process, to the same bits anywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from support.places import APPS
from tiers import full

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from image_tools import Course, Team, as_before, digests, given, same  # noqa: F401

from pgasdl import loopback

SHORT = "--iterations 3 --batch 4"
UNMAPPED = {"mapped": False, "seed": 1, "delay": 1, "reorder": True, "late_source": True}


def alone(arguments: str) -> Course:
    """One process's course, a plain PyTorch loop."""
    course = Course(given(arguments))
    course.train(Team())
    return course


def trained(size: int, arguments: str, **transport: Any) -> list[Course]:
    """Every rank's course; the ranks are threads."""
    parsed = given(arguments)

    def program(ctx: Any) -> Course:
        course, team = Course(parsed), Team(ctx, plan=parsed.plan)
        course.train(team)
        course.common_digest(team)
        return course

    return loopback.run(size, program, **transport)


@pytest.mark.parametrize("size", full([3, 2, 4], quick=1))
def test_ranks_train_the_network_of_one_process(size: int) -> None:
    """In double precision, where an error that is no rounding stands out."""
    arguments = f"{SHORT} --dtype float64"
    one = alone(arguments)
    for course in trained(size, arguments):
        same(course, one)
        np.testing.assert_allclose(course.losses, one.losses, rtol=0, atol=1e-11)


@pytest.mark.full
def test_the_loss_falls_alike_in_single_precision() -> None:
    one = alone("")
    assert np.mean(one.losses[-5:]) < one.losses[0] / 10
    for size in (2, 3):
        np.testing.assert_allclose(trained(size, "")[0].losses, one.losses, rtol=0, atol=0.02)


@pytest.mark.parametrize("size", full([2, 3]))
def test_the_same_bits_on_every_transport_and_in_every_run(size: int, tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    program = APPS / "train_images.py"
    out = jobs.run(size, program, *SHORT.split(), "--picture", str(picture))
    (over_shm,) = digests(out)
    assert f"the same bits on {size} ranks" in out
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
