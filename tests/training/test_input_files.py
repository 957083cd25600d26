"""Striped files: written, read, damaged, and given to PyTorch's DataLoader."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from input_tools import RECORD, records, right, striped

from pgasdl import (
    DataError,
)
from pgasdl.input import Batches, StripedFiles, StripedWriter


@pytest.mark.parametrize("stripe", [1, 2, 7])
@pytest.mark.parametrize("n_files", [1, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 5, 12, 43])
def test_a_round_trip(tmp_path: Path, count: int, n_files: int, stripe: int) -> None:
    given = records(count)
    index = tmp_path / "set.json"
    chance = random.Random(count)
    with StripedWriter(index, RECORD, files=n_files, stripe=stripe) as writer:
        done = 0
        while done < count:
            more = given[done : done + chance.randint(0, 9)]
            if chance.random() < 0.5:
                writer.append(more)
            else:
                writer.append({"label": more["label"].tolist(), "image": more["image"]})
            done += len(more)
        assert not index.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["set.json", *(f"set-{number:03d}.npy" for number in range(n_files))]
    )
    with StripedFiles(index) as files:
        assert len(files) == count and files.dtype == RECORD
        files.verify()
        rows = [chance.randrange(count) for _ in range(20)] if count else []
        batch = files[rows]
        for name in ("image", "label"):
            assert batch[name].dtype == given[name].dtype
            assert np.array_equal(batch[name], given[name][rows])
        for row in rows[:3]:
            one = files[row]
            assert one["image"].shape == (3, 5, 5) and one["label"] == given["label"][row]
    # The files are NumPy's: record i lies in file (i // stripe) % n_files.
    for number in range(n_files):
        mine = [i for i in range(count) if i // stripe % n_files == number]
        assert np.array_equal(np.load(tmp_path / f"set-{number:03d}.npy"), given[mine])


def test_files_of_several_folders_found_from_the_index(tmp_path: Path) -> None:
    for name in ("set", "set/a", "b"):
        (tmp_path / name).mkdir()
    paths = ["a/x.npy", "../b/x.npy", str(tmp_path / "absolute.npy")]
    with StripedWriter(tmp_path / "set/index", RECORD, files=paths, stripe=1) as writer:
        writer.append(records(7))
    with StripedFiles(tmp_path / "set/index") as files:
        again = copy.copy(files)  # as for a worker process
        assert np.array_equal(again[range(7)]["image"], records(7)["image"])
        assert np.array_equal(files[np.arange(7)]["label"], records(7)["label"])


def test_writing_that_is_refused_or_fails_leaves_nothing(tmp_path: Path) -> None:
    index = tmp_path / "set.json"
    for dtype in ("u1", [("x", object)], [("x", "u1", (0,))], [], "f4"):
        with pytest.raises(ValueError, match="dtype"):
            StripedWriter(index, dtype, files=2, stripe=1)
    gaps = np.dtype([("x", "u1"), ("y", "i8")], align=True)
    with pytest.raises(ValueError, match="gaps"):
        StripedWriter(index, gaps, files=2, stripe=1)
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    with pytest.raises(ValueError, match="NumPy's own"):
        StripedWriter(index, [("x", bfloat16)], files=2, stripe=1)
    for wrong in ({"stripe": 0}, {"files": 0}, {"files": ["a", "a"]}):
        with pytest.raises(ValueError, match=r"stripe 0|files"):
            StripedWriter(index, RECORD, **{"files": 2, "stripe": 1, **wrong})
    with pytest.raises(KeyboardInterrupt), StripedWriter(index, RECORD, files=2, stripe=1) as w:
        w.append(records(3))
        raise KeyboardInterrupt
    with StripedWriter(index, RECORD, files=2, stripe=1) as writer:
        for bad in (
            records(2)["image"],
            {"image": records(2)["image"]},
            {"image": records(2)["image"], "label": [1, 2, 3]},
            {"image": records(2)["image"][0], "label": 1},
            {"image": records(2)["image"][:, 0], "label": [1, 2]},
        ):
            with pytest.raises(ValueError, match="wanted"):
                writer.append(bad)
        writer.abandon()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "set-001.npy").touch()
    with pytest.raises(FileExistsError):
        StripedWriter(index, RECORD, files=2, stripe=1)
    assert [path.name for path in tmp_path.iterdir()] == ["set-001.npy"]
    (tmp_path / "set-001.npy").unlink()
    striped(tmp_path, 3)
    with pytest.raises(FileExistsError):
        StripedWriter(index, RECORD, files=["other"], stripe=1)


def test_the_index_is_not_written_through_a_link(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("theirs")
    (tmp_path / "set.json.new").symlink_to(other)
    with StripedFiles(striped(tmp_path, 7)) as files:
        assert len(files) == 7
    assert other.read_text() == "theirs"
    assert not (tmp_path / "set.json").is_symlink()


@pytest.mark.parametrize(
    ("dtype", "right", "wrong"),
    [
        ("i1", ([-128, 127], np.array([7], np.uint64)), ([300], [1.0], np.array([2**63]))),
        ("u1", ([0, 255], [True]), ([-1], [256], ["1"])),
        ("u8", ([2**63],), ([-1], [np.nan])),
        ("?", ([True],), ([1],)),
        ("f2", ([0.1, np.nan, np.inf, 7], [65504]), ([1e10], [65505], [1j])),
        ("f4", ([1e-60, -0.0], [2**24]), ([1e300], [2**24 + 1])),
        ("S2", ([b"ab", b""], [7]), ([b"abc"], [777], ["ab"])),
        ("M8[s]", (np.array(["NaT", "2026-01-01"], "M8[ms]"),), (np.array([1], "M8[ms]"),)),
    ],
)
def test_values_are_written_as_they_are(tmp_path: Path, dtype: str, right: Any, wrong: Any) -> None:
    wanted = np.concatenate([np.array(values).astype(dtype) for values in right])
    with StripedWriter(tmp_path / "set", [("a", dtype)], files=1, stripe=1) as writer:
        for values in right:
            writer.append({"a": values})
        for values in wrong:
            with pytest.raises(ValueError, match=r"a: .* (kind of|do not fit)"):
                writer.append({"a": values})
    with StripedFiles(tmp_path / "set") as files:
        assert files[range(len(wanted))]["a"].tobytes() == wanted.tobytes()


def test_a_mask_selects_records(tmp_path: Path) -> None:
    given = records(5)
    out = {"image": np.empty((2, 3, 5, 5), np.uint8), "label": np.empty(2, np.int64)}
    with StripedFiles(striped(tmp_path, 5)) as files:
        for mask in ([False, True, False, True, False], np.arange(5) % 2 == 1):
            assert files[mask]["label"].tolist() == given["label"][[1, 3]].tolist()
            files.read(mask, out)
            assert np.array_equal(out["image"], given["image"][[1, 3]])
        assert len(files[np.zeros(5, bool)]["label"]) == 0
        for wrong in ([True], [True] * 6, np.ones((5, 1), bool)):
            with pytest.raises(IndexError, match="a mask of shape"):
                files[wrong]
        for wrong in (True, np.True_):
            with pytest.raises(TypeError):
                files[wrong]


def test_reading_that_is_refused(tmp_path: Path) -> None:
    files = StripedFiles(striped(tmp_path, 5))
    for row in (5, -1):
        with pytest.raises(IndexError, match=f"record {row}"):
            files[[0, row]]
    with pytest.raises(TypeError):
        files[[0.5]]
    good = files[[1, 2]]
    for name, array in (
        ("image", np.empty((3, 3, 5, 5), np.uint8)),
        ("label", np.empty(2, np.int32)),
        ("label", np.empty(4, np.int64)[::2]),
        ("label", np.broadcast_to(np.int64(1), 2)),
    ):
        with pytest.raises(ValueError, match=name):
            files.read([1, 2], {**good, name: array})
    assert len(list(files)) == 5  # it ends by IndexError
    files.close()
    files.close()
    with pytest.raises(ValueError, match="closed"):
        files[[1]]


def edit(path: Path, change: Callable[[Any], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_files_that_are_damaged(tmp_path: Path) -> None:
    index = striped(tmp_path, 11)
    first, second, third = (tmp_path / f"set-00{number}.npy" for number in range(3))
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def refused(told: str) -> None:
        for _ in range(2):
            with pytest.raises(DataError, match=told):
                StripedFiles(index).verify()
        for path, data in kept.items():
            path.write_bytes(data)
        StripedFiles(index).verify()

    first.write_bytes(kept[first][:-1])
    refused(r"set-000.npy has \d+ bytes; 4 records end at")
    first.write_bytes(kept[first] + b"x")
    refused("set-000.npy has")
    first.write_bytes(kept[first][:40])
    refused("set-000.npy is no file of records")
    first.unlink()
    refused("set.json names .*set-000.npy, which is no file")
    first.write_bytes(b"")
    refused("no file of records")
    np.save(first, np.zeros(5))
    refused("no fields")
    np.save(first, np.zeros(4, [("image", "u1", (3, 5, 5)), ("label", "<i4")]))
    refused("has records of")
    first.write_bytes(kept[third])
    refused("has 3 records; by .* it has 4")
    first.write_bytes(kept[second])
    refused("not have the records that were written")
    data = bytearray(kept[first])
    data[-1] ^= 1
    first.write_bytes(data)
    refused("not have the records that were written")
    edit(index, lambda document: document.update(n_records=12))
    refused("its numbers do not fit")
    edit(index, lambda document: document["files"].reverse())
    refused("its numbers do not fit")
    edit(index, lambda document: document["files"][2].update(path="set-000.npy"))
    refused("has 4 records; by .* it has 3")
    edit(index, lambda document: document["files"][0].update(path="."))
    refused("is no file")
    edit(index, lambda document: document["files"][0].update(path=""))
    refused("'' is no path")
    edit(index, lambda document: document.update(version=2))
    refused("its version is 2")
    edit(index, lambda document: document.update(stripe=0))
    refused("at least 1")
    edit(index, lambda document: document.update(files=[]))
    refused("names no file")
    index.write_bytes(first.read_bytes())
    refused("no index of striped files")
    index.unlink()
    with pytest.raises(FileNotFoundError):
        StripedFiles(index)


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    index = striped(tmp_path, 11)
    with StripedFiles(index) as files:
        path = tmp_path / "set-002.npy"
        path.write_bytes(path.read_bytes()[:-30])
        with pytest.raises(DataError, match=r"set-002.npy ended before record 10"):
            files[range(11)]
        with pytest.raises(DataError, match="cut"):
            files.verify()


@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_dataloader_takes_files_and_batches(data: StripedFiles, n_workers: int) -> None:
    torch = pytest.importorskip("torch")
    iterations = Batches(43, 10, rank=1, size=3).iterations(3, 9)
    loader = torch.utils.data.DataLoader(
        data, sampler=iterations, batch_size=None, num_workers=n_workers
    )
    assert len(loader) == 6
    for rows, batch in zip(iterations, loader, strict=True):
        assert isinstance(batch["image"], torch.Tensor)
        right({name: tensor.numpy() for name, tensor in batch.items()}, rows)
    loader = torch.utils.data.DataLoader(data, batch_sampler=iterations, num_workers=n_workers)
    for rows, batch in zip(iterations, loader, strict=True):
        right({name: tensor.numpy() for name, tensor in batch.items()}, rows)
