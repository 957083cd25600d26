"""Checkpoints: what is stored comes back as it was, or the checkpoint is refused."""

from __future__ import annotations

import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.environment import environment

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from pgasdl.checkpoint import FORMATS, CheckpointError, Checkpoints, files, load  # noqa: E402
from pgasdl.checkpoint.state import digest, flatten  # noqa: E402

every_format = pytest.mark.parametrize("format", FORMATS)


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
    assert digest(*flatten(found)) == digest(*flatten(state))
    assert found["groups"][0]["betas"] == [0.9, 0.1 + 0.2]
    assert list(found["state"]) == [0]


def test_what_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    for odd in (1j, {1}, b"1", np.float32(1)):
        with pytest.raises(TypeError, match=rf"x\.0: JSON cannot hold a {type(odd).__name__}"):
            Checkpoints(tmp_path).save(1, {"x": [odd]})
    with pytest.raises(TypeError, match="x: safetensors holds no torch"):
        Checkpoints(tmp_path).save(1, {"x": torch.ones(1, dtype=torch.complex128)})
    with pytest.raises(TypeError, match=r"a: key \(1, 2\)"):  # it would come back as a list
        Checkpoints(tmp_path).save(1, {"a": {(1, 2): 3}})
    with pytest.raises(ValueError, match="iteration -1"):
        Checkpoints(tmp_path).save(-1, {})
    with pytest.raises(ValueError, match="iteration -1"):
        Checkpoints(tmp_path).save_sharded(-1, {}, [], lambda blob: [blob])
    assert Checkpoints(tmp_path).load_last() is None


def test_the_last_one_is_that_of_the_last_iteration(tmp_path: Path) -> None:
    for iteration in (99_999_999, 100_000_000):
        Checkpoints(tmp_path).save(iteration, {"at": iteration})
    shutil.copy(tmp_path / "99999999.safetensors", tmp_path / "best.safetensors")
    assert Checkpoints(tmp_path).load_last() == {"at": 100_000_000}


def test_the_last_one_may_have_another_format(tmp_path: Path) -> None:
    Checkpoints(tmp_path, "dcp").save(2, {"format": "dcp"})
    Checkpoints(tmp_path).save(1, {"format": "safetensors"})
    assert Checkpoints(tmp_path).load_last() == {"format": "dcp"}
    Checkpoints(tmp_path).save(2, {"format": "safetensors"})
    for format in FORMATS:
        assert Checkpoints(tmp_path, format).load_last() == {"format": format}


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name, error in (("file", NotADirectoryError), ("loop", OSError)):
        with pytest.raises(error):
            Checkpoints(tmp_path / name).load_last()
        with pytest.raises(error):
            Checkpoints(tmp_path / name).open_last()


# --- damage


def files_of(path: Path) -> list[Path]:
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
        load(last)
    found = checkpoints.load_last()
    assert found is not None and found["iteration"] == 1
    assert f"{last} is damaged" in capsys.readouterr().err


@every_format
def test_a_truncated_checkpoint_is_refused(
    two: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in files_of(two.path(2)):
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
    expected = digest(*flatten(load(two.path(2))))
    n_refused = 0
    for file in files_of(two.path(2)):
        whole = file.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 60)):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
            try:
                found = load(two.path(2))
            except CheckpointError:
                n_refused += 1
            else:  # padding, or a time
                assert digest(*flatten(found)) == expected
        file.write_bytes(whole)
    assert n_refused > 30


@pytest.mark.parametrize("format", ["dcp"])
def test_a_missing_part_is_refused(two: Checkpoints, capsys: pytest.CaptureFixture[str]) -> None:
    for file in files_of(two.path(2)):
        whole = file.read_bytes()
        file.unlink()
        refused(two, capsys)
        file.write_bytes(whole)


class Stranger:
    """Code that runs where it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code of a stranger runs",)


@pytest.mark.parametrize("format", ["safetensors"])
def test_a_folder_does_not_pass_for_a_file(
    two: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of format "dcp" would be unpickled."""
    forged = two.path(3)
    forged.mkdir()
    (forged / ".metadata").write_bytes(pickle.dumps(Stranger()))
    with pytest.raises(CheckpointError, match="damaged or unreadable"):
        load(forged)
    found = two.load_last()
    assert found is not None and found["iteration"] == 2
    assert "stranger" not in capsys.readouterr().out


@every_format
def test_none_or_only_damaged_ones(two: Checkpoints, tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nowhere").load_last() is None
    for iteration in (1, 2):
        for file in files_of(two.path(iteration)):
            file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="every checkpoint"):
        two.load_last()


@every_format
def test_want_of_memory_or_files_is_not_damage(
    two: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank must not go back alone."""

    def enough_for_others(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            load(two.path(2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    monkeypatch.setattr("pgasdl.checkpoint.forms.unflatten", enough_for_others)
    with pytest.raises(MemoryError):
        two.load_last()


# --- other users


class Evil:
    """What a pickle can do to whoever reads it."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.made),)


def as_bytes(metadata: Any, made: Path) -> bytes:
    """Replace a tensor's description by one of bytes that looks like a tensor's."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    old = metadata.state_dict_metadata["iteration.x"]
    odd: Any = BytesStorageMetadata()
    odd.size, odd.properties = old.size, old.properties
    metadata.state_dict_metadata["iteration.x"] = odd
    return pickle.dumps(metadata)


@pytest.mark.parametrize(
    "harm",
    [
        lambda metadata, made: pickle.dumps(Evil(made)),
        lambda metadata, made: pickle.dumps((metadata, Evil(made))),
        lambda metadata, made: b"cposix\nmkdir\n(V" + str(made).encode() + b"\ntR.",
        lambda metadata, made: (
            b"\x80\x04\x8c\x05torch\x8c\x08os.mkdir\x93\x8c"
            + bytes([len(str(made))])
            + str(made).encode()
            + b"\x85R."
        ),
        as_bytes,
    ],
)
def test_nothing_in_a_checkpoint_is_executed(
    harm: Callable[[Any, Path], bytes], tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "c", "dcp")
    checkpoints.save(1, {"iteration": {"x": torch.ones(3)}})
    metadata, made = checkpoints.path(1) / ".metadata", tmp_path / "made"
    metadata.write_bytes(harm(pickle.loads(metadata.read_bytes()), made))
    with pytest.raises(CheckpointError, match="does not describe a tensor"):
        load(checkpoints.path(1))
    assert not made.exists()


def by_stranger(path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can make another user's file")
    os.chown(path, 65534, 65534)


def by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (by_stranger, "belongs to uid 65534"),
        (lambda path: path.chmod(0o666), "others can write to"),
        (by_link, "is a link"),
    ],
)
@every_format
def test_one_that_another_user_could_have_written_does_not_count(
    two: Checkpoints,
    harm: Callable[[Path], None],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    harm(files_of(two.path(2))[-1])
    found = two.load_last()
    assert found is not None and found["iteration"] == 1
    assert re.search(f"is not believed: .*{told}.*; going back", capsys.readouterr().err)
    two.folder.chmod(0o777)
    for call in (
        two.load_last,
        lambda: two.save(3, {}),
        lambda: two.save_sharded(3, {}, [], lambda blob: [blob]),
    ):
        with pytest.raises(CheckpointError, match=r"checkpoints in .* not believed: others can"):
            call()


@every_format
def test_a_users_own_counts_whatever_the_umask_is(format: str, tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        Checkpoints(tmp_path / "new/folder", format).save(1, {"x": torch.ones(3)})
    finally:
        os.umask(before)
    assert Checkpoints(tmp_path / "new/folder", format).load_last() is not None


# --- writers that fail


@every_format
def test_a_full_disk_leaves_nothing(two: Checkpoints) -> None:
    before = sorted(os.listdir(two.folder))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        for weights in (torch.ones(1 << 16), np.ones(1 << 16)):
            with pytest.raises(OSError, match=f"{two.path(3).name}"):
                two.save(3, {"weights": weights})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(os.listdir(two.folder)) == before


def test_what_a_killed_writer_left_goes_with_the_next(tmp_path: Path) -> None:
    """Of any iteration and format, but not what a living writer has."""
    with files.writing(tmp_path / "00000007.dcp") as left:
        left.mkdir()
        shutil.copytree(left.parent, tmp_path / "killed.partial")
        Checkpoints(tmp_path).save(1, {})
        assert sorted(os.listdir(tmp_path)) == ["00000001.safetensors", left.parent.name]
    assert os.listdir(tmp_path) == ["00000001.safetensors"]


@every_format
def test_one_counts_until_it_is_replaced(two: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer stops before each change of a name."""
    replace = Path.replace
    for n_done in range(3):
        left = [n_done]

        def stops(path: Path, name: Path, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            replace(path, name)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", stops)
            with suppress(KeyboardInterrupt):
                two.save(2, {"iteration": 2})
        found = two.load_last()
        assert found is not None and found["iteration"] == 2
    two.save(2, {"iteration": 2})
    assert sorted(os.listdir(two.folder)) == [two.path(1).name, two.path(2).name]


@every_format
def test_one_that_could_not_be_finished_does_not_count(
    two: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", full_disk)
        with pytest.raises(OSError, match="no space"):
            two.save(3, {"iteration": 3})
    found = two.load_last()
    assert found is not None and found["iteration"] == 2
    two.save(3, {"iteration": 3})
    two.save(3, {"iteration": 3})
    assert two.load_last() == {"iteration": 3}
    assert len(os.listdir(two.folder)) == 3


WRITER = """
import itertools, sys
import torch
from pgasdl.checkpoint import Checkpoints
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
        command = [sys.executable, "-P", "-c", WRITER, str(folder), format]
        with subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, text=True
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
