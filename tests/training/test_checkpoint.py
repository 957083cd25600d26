"""Checkpoints of the training programs: resumed to the bit, on any number of ranks, or refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jobs
import pytest
from support.environment import environment
from support.places import APPS
from tiers import full

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import checkpoint  # noqa: E402
from checkpoint import FORMATS, CheckpointError, Checkpoints  # noqa: E402
from image_tools import SMALL, Course, Team, as_before, digests, same, small  # noqa: E402, F401

from pgasdl import loopback  # noqa: E402

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
    tensors: dict[str, Any] = {}
    rest = json.dumps(checkpoint._flatten(state, "", tensors))
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
    arguments = (*SMALL.split(), "--dropout", "0.5", "--format", format)
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


# --- what is stored


@every_format
def test_any_state_comes_back_as_it_was(format: str, tmp_path: Path) -> None:
    tied = torch.arange(6.0).view(2, 3)
    state = {
        "flat": {"a.b": tied, "a": {"c": tied.T}, "empty": torch.empty(0, 2)},
        "state": {0: {"step": torch.tensor(3.0), "half": torch.ones(3, dtype=torch.bfloat16)}},
        "groups": [{"betas": (0.9, 0.1 + 0.2), "fused": None, "on": True, "params": [0, 1]}],
        "numbers": [1e-300, float("inf"), 2**60, torch.tensor([True, False])],
        "nothing": {},
    }
    Checkpoints(tmp_path, format).save(7, state)
    found = Checkpoints(tmp_path, format).load_last()
    assert found is not None
    assert checkpoint._digest(*flat(found)) == checkpoint._digest(*flat(state))
    assert found["groups"][0]["betas"] == [0.9, 0.1 + 0.2]
    assert list(found["state"]) == [0]


def flat(state: dict[str, Any]) -> tuple[dict[str, Any], str]:
    tensors: dict[str, Any] = {}
    rest = json.dumps(checkpoint._flatten(state, "", tensors))
    return tensors, rest


def test_what_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="complex"):
        Checkpoints(tmp_path).save(1, {"x": 1j})
    assert Checkpoints(tmp_path).load_last() is None


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


# --- damage


def files(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


@pytest.fixture
def two(tmp_path: Path, format: str) -> Checkpoints:
    """Checkpoints of iterations 1 and 2."""
    checkpoints = Checkpoints(tmp_path, format)
    for iteration in (1, 2):
        weights = torch.arange(1000.0) * iteration
        checkpoints.save(iteration, {"iteration": iteration, "weights": weights})
    return checkpoints


def refused(checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]) -> None:
    """The last checkpoint is, by name, and the one before it is used."""
    last = checkpoints.path(2)
    with pytest.raises(CheckpointError, match=f"{last} is damaged or unreadable"):
        checkpoint.load(last)
    found = checkpoints.load_last()
    assert found is not None and found["iteration"] == 1
    assert f"{last} is damaged" in capsys.readouterr().err


@every_format
def test_a_truncated_checkpoint_is_refused(
    two: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in files(two.path(2)):
        whole = file.read_bytes()
        for left in (0, 4, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:left])
            # The last byte of a zip archive may be missing: nothing of the state is.
            if file.suffix == ".distcp" and left == len(whole) - 1:
                continue
            refused(two, capsys)
        file.write_bytes(whole)
    found = two.load_last()
    assert found is not None and found["iteration"] == 2


@every_format
def test_a_flipped_bit_is_refused_or_changes_nothing(
    two: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = checkpoint._digest(*flat(checkpoint.load(two.path(2))))
    n_refused = 0
    for file in files(two.path(2)):
        whole = file.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 60)):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
            try:
                found = checkpoint.load(two.path(2))
            except CheckpointError:
                n_refused += 1
            else:  # padding, or a time
                assert checkpoint._digest(*flat(found)) == expected
        file.write_bytes(whole)
    assert n_refused > 30


@pytest.mark.parametrize("format", ["dcp"])
def test_a_missing_part_is_refused(two: Checkpoints, capsys: pytest.CaptureFixture[str]) -> None:
    for file in files(two.path(2)):
        whole = file.read_bytes()
        file.unlink()
        refused(two, capsys)
        file.write_bytes(whole)


@every_format
def test_none_or_only_damaged_ones(two: Checkpoints, tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nowhere").load_last() is None
    for iteration in (1, 2):
        for file in files(two.path(iteration)):
            file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="every checkpoint"):
        two.load_last()


@every_format
def test_one_that_could_not_be_finished_does_not_count(
    two: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_sync", full_disk)
        with pytest.raises(OSError, match="no space"):
            two.save(3, {"iteration": 3})
    found = two.load_last()
    assert found is not None and found["iteration"] == 2
    two.save(3, {"iteration": 3})  # in spite of what is left of the first try
    two.save(3, {"iteration": 3})
    assert two.load_last() == {"iteration": 3}
    assert len(os.listdir(two.folder)) == 3


WRITER = """
import itertools, sys
import torch
from checkpoint import Checkpoints
for iteration in itertools.count(1):
    state = {"iteration": iteration, "weights": torch.full((100_000,), float(iteration))}
    Checkpoints(sys.argv[1], sys.argv[2]).save(iteration, state)
    print(iteration, flush=True)
"""


@pytest.mark.full
@every_format
def test_a_writer_that_is_killed(format: str, tmp_path: Path) -> None:
    for number in range(3):
        folder = tmp_path / str(number)
        command = [sys.executable, "-c", WRITER, str(folder), format]
        with subprocess.Popen(
            command, env=environment(APPS), stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            said = [writer.stdout.readline() for _ in range(2 + number)]
            time.sleep(0.003 * number)
            writer.send_signal(signal.SIGKILL)
            said += writer.stdout.readlines()
        found = Checkpoints(folder, format).load_last()
        assert found is not None
        assert found["iteration"] >= int(said[-1])
        assert (found["weights"] == found["iteration"]).all()
