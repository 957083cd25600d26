"""Checkpoints of the training programs: resumed to the bit, on any number of ranks, or refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jobs
import pytest
from support.places import APPS
from tiers import full

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from image_tools import DATA, SMALL, Course, Team, as_before, digests, same, small  # noqa: E402, F401

from pgasdl import loopback  # noqa: E402
from pgasdl.checkpoint import FORMATS, Checkpoints  # noqa: E402
from pgasdl.checkpoint.state import flatten  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
every_format = pytest.mark.parametrize("format", FORMATS)


def trained(
    size: int, parsed: Any, checkpoints: Checkpoints | None, until: int
) -> list[tuple[Course, dict[str, Any]]]:
    """Every rank's course, resumed and saved, and its state; the ranks are threads."""

    def program(ctx: Any) -> tuple[Course, dict[str, Any]]:
        course, team = Course(parsed), Team(ctx)
        if checkpoints is not None:
            course.resume(checkpoints, team)
        course.train(team, until=until)
        if checkpoints is not None:
            course.save(checkpoints, team)
        return course, course.state(team)

    return loopback.run(size, program)


def bits(state: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    """Everything in a state, to be compared."""
    tensors, rest = flatten(state)
    del tensors["random"]  # threads share PyTorch's generator
    return rest, {name: each.numpy().tobytes() for name, each in tensors.items()}


# --- resuming


@every_format
@pytest.mark.parametrize("size", full([2, 3], quick=1))
def test_resumed_to_the_bit_on_as_many_ranks(size: int, format: str, tmp_path: Path) -> None:
    parsed = small()
    checkpoints = Checkpoints(tmp_path, format)
    trained(size, parsed, checkpoints, 3)
    resumed = trained(size, parsed, checkpoints, 6)
    through = trained(size, parsed, None, 6)
    # One rank writes for all: they have the same.
    assert all(bits(state) == bits(through[0][1]) for _, state in resumed + through)


@every_format
@pytest.mark.parametrize(("before", "after"), full([(2, 3), (3, 2), (1, 2), (3, 1)], quick=1))
def test_resumed_on_another_number_of_ranks(
    before: int, after: int, format: str, tmp_path: Path
) -> None:
    """A checkpoint loads as it was saved; from there on sums are rounded in another way."""
    parsed = small("--dtype float64")
    checkpoints = Checkpoints(tmp_path, format)
    saved = trained(before, parsed, checkpoints, 3)[0][1]

    def program(ctx: Any) -> dict[str, Any]:
        course, team = Course(parsed), Team(ctx)
        course.resume(checkpoints, team)
        return course.state(team)

    assert all(bits(state) == bits(saved) for state in loopback.run(after, program))
    (through, _), *_ = trained(before, parsed, None, 6)
    resumed = trained(after, parsed, checkpoints, 6)
    assert len({course.digest() for course, _ in resumed}) == 1
    same(resumed[0][0], through)
    assert resumed[0][0].losses == pytest.approx(through.losses, abs=1e-11)


@every_format
def test_random_numbers_go_on(format: str, tmp_path: Path) -> None:
    parsed = small("--dropout 0.5")
    checkpoints = Checkpoints(tmp_path, format)
    course = Course(parsed)
    course.train(Team(), until=3)
    course.save(checkpoints, Team())
    course.train(Team())
    torch.manual_seed(99)
    resumed = Course(parsed)
    assert resumed.resume(checkpoints, Team())
    resumed.train(Team())
    assert resumed.digest() == course.digest() and resumed.losses == course.losses


@pytest.mark.full
@every_format
def test_the_command_goes_on(format: str, tmp_path: Path) -> None:
    """Processes, each with its own random numbers: the same bits as without a stop."""
    program = APPS / "train_images.py"
    arguments = (*DATA, *SMALL.split(), "--dropout", "0.5", "--format", format)
    here, there = ("--checkpoints", str(tmp_path / "1")), ("--checkpoints", str(tmp_path / "2"))
    through = jobs.run(2, program, *arguments, *there)
    first = jobs.run(2, program, *arguments, *here, "--until", "3")
    second = jobs.run(2, program, *arguments, *here)
    assert "going on from iteration 3" in second
    assert digests(first) != digests(second) == digests(through)
    assert f"{6:08d}.{format}" in os.listdir(tmp_path / "1")
    again = jobs.run(3, program, *arguments, *here)  # nothing is left to do
    assert digests(again) == digests(through)


def test_another_course_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    course = Course(small())
    course.save(checkpoints, Team())
    with pytest.raises(SystemExit, match=r"made with .*'seed': 1.*, not with .*'seed': 2"):
        Course(small("--seed 2")).resume(checkpoints, Team())


def test_ranks_with_different_folders_are_told(tmp_path: Path) -> None:
    parsed = small()
    Course(parsed).save(Checkpoints(tmp_path / "0"), Team())

    def program(ctx: Any) -> str:
        with pytest.raises(SystemExit) as refused:
            Course(parsed).resume(Checkpoints(tmp_path / str(ctx.rank)), Team(ctx))
        return str(refused.value)

    assert all("iterations [0, -1]" in text for text in loopback.run(2, program))


def test_other_programs_read_the_weights(tmp_path: Path) -> None:
    """By the libraries of the formats alone."""
    import safetensors.torch
    from torch.distributed import checkpoint as dcp

    course = Course(small())
    course.train(Team(), until=1)
    for format in FORMATS:
        course.save(Checkpoints(tmp_path, format), Team())
    found = safetensors.torch.load_file(tmp_path / "00000001.safetensors")
    for name, weight in course.model.state_dict().items():
        assert torch.equal(found[f"model.{name}"], weight)
    assert {"exp_avg", "exp_avg_sq", "step"} == {
        name.split(".")[-1] for name in found if name.startswith("optimizer.state.0.")
    }
    other = Course(small("--seed 2"))
    dcp.load(
        {"model": other.model.state_dict()}, checkpoint_id=tmp_path / "00000001.dcp", no_dist=True
    )
    assert other.digest() == course.digest()
