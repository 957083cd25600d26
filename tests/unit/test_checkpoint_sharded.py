"""Checkpoints that several ranks write together: read in any windows, or refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.environment import environment

pytest.importorskip("safetensors")

from pgasdl import loopback
from pgasdl.checkpoint import CheckpointError, Checkpoints, Shard, Sharded, files, open_sharded
from pgasdl.checkpoint.state import digest

SIZE = 3
Gather = Callable[[bytes], list[bytes]]


@pytest.fixture(autouse=True, scope="module")
def fast_disk() -> Iterator[None]:
    """Nothing waits for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def ranks(program: Callable[[int, Gather], Any], size: int = SIZE) -> list[Any]:
    """What each rank returns or raises; the ranks are threads."""
    told: list[bytes] = [b""] * size
    barrier = threading.Barrier(size, timeout=20)

    def rank(k: int) -> Any:
        def gather(blob: bytes) -> list[bytes]:
            told[k] = blob
            barrier.wait()
            everybody = list(told)
            barrier.wait()
            return everybody

        try:
            return program(k, gather)
        except CheckpointError as error:
            return error
        except BaseException as error:
            barrier.abort()  # the others shall not wait
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def bands(whole: dict[str, Any], k: int, size: int = SIZE) -> list[Shard]:
    """Rank k's rows of each matrix."""
    shards = []
    for name, array in whole.items():
        first, last = (len(array) * at // size for at in (k, k + 1))
        shards.append(Shard(name, array.shape, first, 0, array[first:last]))
    return shards


def save(folder: Path, iteration: int, whole: dict[str, Any]) -> None:
    """Write by three ranks, each its rows."""

    def program(k: int, gather: Gather) -> None:
        state = {"iteration": iteration, "rates": np.full(3, 0.5)}
        Checkpoints(folder).save_sharded(iteration, state, bands(whole, k), gather)

    assert ranks(program) == [None] * SIZE


def matrix(rows: int, columns: int, dtype: Any = np.float32) -> Any:
    """All elements differ where the dtype has so many values."""
    return np.arange(rows * columns).reshape(rows, columns).astype(dtype)


# --- what is read


def test_a_checkpoint_of_three_ranks_is_read_by_any(tmp_path: Path) -> None:
    whole = {"weights": matrix(10, 7), "bias": matrix(10, 1, ml_dtypes.bfloat16)}
    save(tmp_path, 10, whole)
    assert os.listdir(tmp_path) == ["00000010.sharded"]
    assert sorted(os.listdir(tmp_path / "00000010.sharded")) == [
        "index.json",
        *(f"rank-{k:04d}.safetensors" for k in range(SIZE)),
        "state.safetensors",
    ]
    found = Checkpoints(tmp_path).open_last()
    assert found is not None and found.path == Checkpoints(tmp_path).sharded_path(10)
    assert found.names() == ["bias", "weights"]
    for name, array in whole.items():
        assert found.shape(name) == array.shape and found.dtype(name) == array.dtype
        same(found.read(name), array)
    state = found.state()
    assert state["iteration"] == 10 and (state["rates"] == 0.5).all()
    with pytest.raises(KeyError):
        found.read("nothing")
    with pytest.raises(ValueError, match="no steps"):
        found.read("weights", rows=slice(0, 4, 2))


def same(found: Any, expected: Any) -> None:
    assert type(found) is np.ndarray and found.dtype == expected.dtype
    assert found.shape == expected.shape and found.tobytes() == expected.tobytes()


cuts = st.lists(st.integers(0, 9), max_size=4)
bounds = st.none() | st.integers(-12, 12)
windows = st.builds(slice, bounds, bounds)


@given(
    shape=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    across=cuts,
    down=cuts,
    deal=st.randoms(use_true_random=False),
    asked=st.lists(st.tuples(windows, windows), min_size=1, max_size=4),
    dtype=st.sampled_from([np.float32, np.bool_, np.int64, ml_dtypes.bfloat16]),
)
def test_any_window_of_any_layout(
    shape: tuple[int, int],
    across: list[int],
    down: list[int],
    deal: Any,
    asked: list[tuple[slice, slice]],
    dtype: Any,
) -> None:
    """The matrix is cut at lines across and down, and the ranks are dealt the blocks."""
    whole = matrix(*shape, dtype)
    row_edges, column_edges = (
        sorted({0, extent, *(min(cut, extent) for cut in lines)})
        for extent, lines in zip(shape, (across, down), strict=True)
    )
    hands: list[list[Shard]] = [[] for _ in range(SIZE)]
    # Of a matrix without elements there is one block without elements.
    for top, bottom in zip(row_edges[:-1] or [0], row_edges[1:] or [0], strict=True):
        for left, right in zip(column_edges[:-1] or [0], column_edges[1:] or [0], strict=True):
            block = Shard("w", shape, top, left, whole[top:bottom, left:right])
            deal.choice(hands).append(block)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder)
        done = ranks(lambda k, gather: checkpoints.save_sharded(1, {}, hands[k], gather))
        assert done == [None] * SIZE
        found = open_sharded(checkpoints.sharded_path(1))
        assert found.shape("w") == shape
        for rows, columns in asked:
            same(found.read("w", rows, columns), whole[rows, columns])


def test_only_what_a_window_overlaps_is_read(tmp_path: Path) -> None:
    whole = {"w": matrix(9, 4)}
    save(tmp_path, 1, whole)
    found = open_sharded(tmp_path / "00000001.sharded")
    (found.path / "rank-0002.safetensors").unlink()
    same(found.read("w", rows=slice(1, 6)), whole["w"][1:6])
    with pytest.raises(CheckpointError, match=r"rank-0002\.safetensors is damaged or unreadable"):
        found.read("w", rows=slice(1, 7))


def test_ranks_of_a_job(tmp_path: Path) -> None:
    """Written by three, read by two in columns, by the functions that programs call."""
    whole = matrix(12, 8)

    def writes(ctx: Any) -> None:
        Checkpoints(tmp_path).save_sharded(
            4,
            {"iteration": 4},
            bands({"w": whole}, ctx.rank),
            gather=lambda blob: ctx.world.allgather("checkpoint", blob),
        )

    def reads(ctx: Any) -> Any:
        found = Checkpoints(tmp_path).open_last()
        assert found is not None and found.state() == {"iteration": 4}
        return found.read("w", columns=slice(4 * ctx.rank, 4 * ctx.rank + 4))

    loopback.run(SIZE, writes)
    same(np.hstack(loopback.run(2, reads)), whole)


def test_ranks_may_save_one_state_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Barrier(SIZE, timeout=20)
    monkeypatch.setattr(files, "sync", lambda _: written.wait())
    state = {"weights": matrix(3, 3)}
    assert ranks(lambda *_: Checkpoints(tmp_path).save(1, state)) == [None] * SIZE
    assert os.listdir(tmp_path) == ["00000001.safetensors"]


# --- what is refused when it is written


def refused(tmp_path: Path, hands: list[list[Shard]], why: str) -> None:
    """On all ranks, and nothing has a name."""
    done = ranks(lambda k, gather: Checkpoints(tmp_path).save_sharded(1, {}, hands[k], gather))
    assert [type(each) for each in done] == [CheckpointError] * SIZE
    assert all(why in str(each) for each in done), done[0]
    assert Checkpoints(tmp_path).open_last() is None


def test_blocks_that_do_not_fit_are_refused_on_all_ranks(tmp_path: Path) -> None:
    a = np.ones((2, 2))
    rows = [Shard("w", (6, 2), 2 * k, 0, a) for k in range(3)]
    refused(tmp_path, [[rows[0]], [rows[1]], []], "lies in 0 blocks")
    refused(tmp_path, [[rows[0]], rows[:2], [rows[2]]], "lies in 2 blocks")
    wrong = Shard("w", (6, 2), 5, 0, a)
    refused(tmp_path, [[rows[0]], [rows[1]], [wrong]], "rank 2: ValueError: w: a block of (2, 2)")
    wrong = Shard("w", (6, 2), 4, 0, np.ones((2, 2), np.float32))
    refused(tmp_path, [[rows[0]], [rows[1]], [wrong]], "the ranks differ in its dtype or shape")
    wrong = Shard("w", (6, 2), 4, 0, np.ones((2, 2), complex))
    refused(tmp_path, [[rows[0]], [rows[1]], [wrong]], "rank 2: TypeError: w: an array of dtype")
    wrong = Shard("w", (6, 2), 4, 0, np.ones(2))
    refused(tmp_path, [[rows[0]], [rows[1]], [wrong]], "a block of 1 dimensions")


def test_ranks_with_different_folders_are_told(tmp_path: Path) -> None:
    def program(k: int, gather: Gather) -> None:
        folder = tmp_path / str(k // 2 * 2)
        Checkpoints(folder).save_sharded(1, {}, bands({"w": matrix(6, 2)}, k), gather)

    done = ranks(program)
    assert all(f"no {tmp_path}/2/00000001.sharded." in str(each) for each in done), done


def test_a_full_disk_of_one_rank_ends_the_writing_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {"w": matrix(9, 4)}
    save(tmp_path, 1, whole)

    def full_disk(path: Path) -> str:
        if path.name == "rank-0001.safetensors":
            raise OSError("no space left")
        return ""

    with monkeypatch.context() as patch:
        patch.setattr("pgasdl.checkpoint.spread.sha256", full_disk)
        done = ranks(
            lambda k, gather: Checkpoints(tmp_path).save_sharded(2, {}, bands(whole, k), gather)
        )
    assert [type(each) for each in done] == [CheckpointError] * SIZE
    assert all("rank 1: OSError: no space left" in str(each) for each in done)
    assert os.listdir(tmp_path) == ["00000001.sharded"]
    found = Checkpoints(tmp_path).open_last()
    assert found is not None and found.path.name == "00000001.sharded"
    save(tmp_path, 2, whole)
    save(tmp_path, 2, whole)
    assert sorted(os.listdir(tmp_path)) == ["00000001.sharded", "00000002.sharded"]


def test_all_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def named(path: Path, name: Path) -> None:
        assert {path.name, *os.listdir(path)} == set(synced)
        assert name.name == "00000001.sharded"
        os.rename(path, name)
        synced.clear()

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", named)
    save(tmp_path, 1, {"w": matrix(9, 4)})
    assert synced == [tmp_path.name]


@pytest.mark.parametrize("files_left", range(6))
def test_killed_between_files(
    files_left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stop at a file that is to reach the disk: no other checkpoint has a name."""
    whole = {"w": matrix(9, 4)}
    save(tmp_path, 1, whole)
    lock, left = threading.Lock(), [files_left]

    class Killed(BaseException):
        pass

    def killed(path: Path) -> None:
        with lock:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
        sync(path)

    sync = files.sync
    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", killed)
        patch.setattr("pgasdl.checkpoint.spread.sync", killed)
        done = ranks(
            lambda k, gather: Checkpoints(tmp_path).save_sharded(2, {}, bands(whole, k), gather)
        )
    assert any(isinstance(each, Killed) for each in done)
    found = Checkpoints(tmp_path).open_last()
    assert found is not None and found.path.name == "00000001.sharded"


WRITER = """
import itertools, sys
import numpy as np
from pgasdl import loopback
from pgasdl.checkpoint import Checkpoints, Shard
def program(ctx):
    gather = lambda blob: ctx.world.allgather("checkpoint", blob)
    for iteration in itertools.count(1):
        block = np.full((100, 300), iteration)
        shards = [Shard("w", (300, 300), 100 * ctx.rank, 0, block)]
        Checkpoints(sys.argv[1]).save_sharded(iteration, {"iteration": iteration}, shards, gather)
        if ctx.rank == 0:
            print(iteration, flush=True)
loopback.run(3, program)
"""


@pytest.mark.full
def test_writers_that_are_killed(tmp_path: Path) -> None:
    for number in range(6):
        folder = tmp_path / str(number)
        command = [sys.executable, "-P", "-c", WRITER, str(folder)]
        with subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            said = [writer.stdout.readline() for _ in range(2 + number)]
            time.sleep(0.003 * number)
            writer.send_signal(signal.SIGKILL)
            said += writer.stdout.readlines()
        found = Checkpoints(folder).open_last()
        assert found is not None
        iteration = found.state()["iteration"]
        assert iteration >= int(said[-1])
        assert (found.read("w") == iteration).all()


# --- damage


@pytest.fixture
def two(tmp_path: Path) -> Checkpoints:
    """Checkpoints of iterations 1 and 2."""
    for iteration in (1, 2):
        save(tmp_path, iteration, {"w": matrix(9, 4) * iteration})
    return Checkpoints(tmp_path)


def damaged(two: Checkpoints, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last checkpoint is refused by the name of the file, and the one before it is used."""
    with pytest.raises(CheckpointError, match=f"{file} is damaged or unreadable"):
        open_sharded(two.sharded_path(2))
    found = two.open_last()
    assert isinstance(found, Sharded) and found.state()["iteration"] == 1
    assert f"{file} is damaged" in capsys.readouterr().err


def test_torn_missing_and_changed_files_are_refused(
    two: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in sorted(two.sharded_path(2).iterdir()):
        whole = file.read_bytes()
        for left in (0, 4, len(whole) // 2, len(whole) - 2):  # the last of the index is a newline
            file.write_bytes(whole[:left])
            damaged(two, file, capsys)
        for at in range(0, len(whole) - 1, 1 + len(whole) // 40):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            damaged(two, file, capsys)
        file.unlink()
        damaged(two, file, capsys)
        file.write_bytes(whole)
    found = two.open_last()
    assert found is not None
    same(found.read("w"), matrix(9, 4) * np.float32(2))


def test_another_version_is_told(two: Checkpoints) -> None:
    path = two.sharded_path(2) / "index.json"
    document = json.loads(path.read_text()) | {"version": 2}
    document.pop("sha256")
    path.write_text(json.dumps({**document, "sha256": digest({}, json.dumps(document))}))
    with pytest.raises(CheckpointError, match="'version': 2"):
        open_sharded(two.sharded_path(2))


def test_a_folder_with_those_of_the_other_kind_alone_is_not_taken_for_none(
    two: Checkpoints, tmp_path: Path
) -> None:
    """Training would begin anew."""
    with pytest.raises(CheckpointError, match="only checkpoints that open_last"):
        two.load_last()
    one = Checkpoints(tmp_path / "one")
    one.save(1, {})
    with pytest.raises(CheckpointError, match="only checkpoints that load_last"):
        one.open_last()


def test_none_or_only_damaged_ones(two: Checkpoints, tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nowhere").open_last() is None
    for iteration in (1, 2):
        (two.sharded_path(iteration) / "index.json").unlink()
    with pytest.raises(CheckpointError, match="every checkpoint"):
        two.open_last()
