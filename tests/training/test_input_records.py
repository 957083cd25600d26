"""Data sets in well-known formats, read through memory, disk and storage."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
import statistics
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_tools import tar_of
from hypothesis import given, settings
from hypothesis import strategies as st
from input_tools import records, saved
from support.patience import took
from tiers import full

from pgasdl import ClosedError, DataError, MismatchError, loopback
from pgasdl.input import Batches, Loader, Records
from pgasdl.input.files import File
from pgasdl.input.formats.tar import Tar
from pgasdl.input.formats.tar_headers import TarHeaders
from pgasdl.input.levels import _LAYOUT, BLOCK
from pgasdl.input.next_use import _BEHIND, NextUse
from pgasdl.input.storage import Storage
from pgasdl.tools.cli import main

SAMPLES = 30


def sample(number: int) -> dict[str, Any]:
    """Some record: its longest field fills a fifth of a block."""
    chance = np.random.default_rng(number)
    return {
        "__key__": f"s{number:04}",
        "bin": chance.bytes(int(chance.integers(0, BLOCK // 5))),
        "cls": str(number % 3).encode(),
    }


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    for file in range(3):
        with tarfile.open(folder / f"set-{file}.tar", "w") as tar:
            for number in range(file * 10, file * 10 + 10):
                for name, data in sample(number).items():
                    if name != "__key__":
                        info = tarfile.TarInfo(f"s{number:04}.{name}")
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
    return folder


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.tar"))


def right(records: Records, numbers: Any = range(SAMPLES)) -> None:
    for number in numbers:
        assert records[number] == sample(number)


def test_files_are_read_as_they_lie(tars: Path) -> None:
    with Records(tars) as records:
        assert len(records) == SAMPLES and records.format == "tar"
        records.announce([1, 2])
        right(records)
        assert records.counters().storage and not records.counters().memory
        assert "set-1.tar, byte" in records.place(12)
        for wrong in (SAMPLES, -1):
            with pytest.raises(IndexError, match="there are 30"):
                records[wrong]
        assert len(list(records)) == SAMPLES
    with pytest.raises(ValueError, match="there are tar"):
        Records(tars, format="zip")
    with pytest.raises(DataError, match="nothing"):
        Records(tars / "nothing")


def test_numpys_files(tmp_path: Path) -> None:
    plain = np.random.default_rng(0).normal(size=(7, 3, 2)).astype(np.float32)
    named = np.zeros(5, [("image", "u1", (2, 2)), ("label", "i8")])
    named["label"] = range(5)
    np.save(tmp_path / "a.npy", plain[:4])
    np.save(tmp_path / "b.npy", plain[4:])
    with Records([tmp_path / "a.npy", tmp_path / "b.npy"]) as records:
        assert np.array_equal([records[k]["array"] for k in range(7)], plain)
    np.save(tmp_path / "c.npy", named)
    with Records(tmp_path / "c.npy") as records:
        assert records[3]["label"] == 3 and records[3]["image"].shape == (2, 2)
    with pytest.raises(DataError, match=r"c\.npy has records of"):
        Records([tmp_path / "a.npy", tmp_path / "c.npy"])
    (tmp_path / "d.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-1])
    with pytest.raises(DataError, match=r"d\.npy has \d+ bytes; 4 records"):
        Records(tmp_path / "d.npy")
    for wrong in (np.array([None]), np.zeros((3, 0)), np.float64(1)):
        np.save(tmp_path / "e.npy", wrong, allow_pickle=True)
        with pytest.raises(DataError, match="plain numbers"):
            Records(tmp_path / "e.npy")
    np.save(tmp_path / "e.npy", plain.T)
    with pytest.raises(DataError, match=r"save np\.ascontiguousarray"):
        Records(tmp_path / "e.npy")
    np.save(tmp_path / "f.npy", np.zeros(2, [(f"field{k}", "f4") for k in range(2000)]))
    with Records(tmp_path / "f.npy") as records:
        assert len(records[1]) == 2000


@pytest.mark.parametrize("above", [False, True])
@pytest.mark.parametrize("n_files", [1, 3])
@pytest.mark.parametrize("dtype", ["f4", ("u1", (2, 3)), ([("x", "u1"), ("y", "<i8", 2)], (2,))])
def test_batches_of_numpys_files(
    tmp_path: Path, dtype: Any, n_files: int, above: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order, read alone and in rows; from the files and through memory and disk."""
    monkeypatch.setattr("pgasdl.input.formats.arrays._PIECE", 150)
    given = records(50, np.dtype(dtype))
    fields = {"array": given} if given.dtype.names is None else {n: given[n] for n in "xy"}
    levels: dict[str, Any] = {"local": tmp_path / "cache", "memory": BLOCK} if above else {}
    chance = np.random.default_rng(0)
    with Records(saved(tmp_path, given, n_files), **levels) as found:
        assert found.dtype is not None and found.dtype.names == tuple(fields)
        for rows in (range(50), [], [7], [3, 3, 2, 1], chance.integers(0, 50, 99), [48, 49, 0, 1]):
            batch = found[rows]
            out = {name: np.empty_like(array) for name, array in batch.items()}
            found.read(rows, out)
            for name, array in fields.items():
                for each in (batch[name], out[name]):
                    assert each.dtype == array.dtype
                    assert each.tobytes() == array[list(rows)].tobytes()


def test_batches_that_are_refused(tmp_path: Path, tars: Path) -> None:
    with Records(saved(tmp_path, records(5))) as found:
        for wrong in (5, -1):
            with pytest.raises(IndexError, match=f"record {wrong}: there are 5"):
                found[[0, wrong]]
        mask = np.arange(5) % 2 == 1
        for rows in (mask, [0.5], [[1]], slice(2), "1"):
            with pytest.raises(TypeError, match="wanted the numbers of records"):
                found[rows]
        good = found[np.flatnonzero(mask)]
        for name, array in (
            ("image", np.empty((3, 3, 5, 5), np.uint8)),
            ("label", np.empty(2, np.int32)),
            ("label", np.broadcast_to(np.int64(1), 2)),
        ):
            with pytest.raises(ValueError, match=rf"{name}: |read-only"):
                found.read([1, 3], {**good, name: array})
    with Records(tars) as found:
        assert found.dtype is None
        for rows in ([1], np.array([1, 2])):
            with pytest.raises(TypeError, match=r"of format tar .* as batch_sampler"):
                found[rows]
        with pytest.raises(ValueError, match="pass local"):
            found.stage()
        with pytest.raises(TypeError, match="format tar have to be decoded"):
            found.read([1], {})


@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_dataloader_takes_records_of_one_size(data: Records, n_workers: int) -> None:
    torch = pytest.importorskip("torch")
    iterations = Batches(43, 10, rank=1, size=3).iterations(3, 9)
    for options in ({"sampler": iterations, "batch_size": None}, {"batch_sampler": iterations}):
        loader = torch.utils.data.DataLoader(data, num_workers=n_workers, **options)
        for rows, batch in zip(iterations, loader, strict=True):
            for name, tensor in batch.items():
                assert np.array_equal(tensor.numpy(), records(43)[name][rows])


def test_memory_and_disk(tars: Path, tmp_path: Path) -> None:
    """Storage is read once; the next job reads none of it."""
    local = tmp_path / "cache"
    with Records(tars, local=local) as records:
        right(records)
        right(records)
        assert records.counters().storage == size_of(tars)
        assert records.counters().memory > 2 * size_of(tars) * 0.9
    with Records(tars, local=local, memory=0) as records:
        right(records, range(0, SAMPLES, 3))
        assert records.counters().storage == 0 and records.counters().memory == 0
    with Records(tars, memory=2 * BLOCK) as records:  # a part of it
        for number in np.random.default_rng(1).integers(0, SAMPLES, 100):
            right(records, [number])


def number_of(record: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    number = int(record["__key__"][1:])
    assert record == sample(number)
    return {"number": number}


@pytest.mark.parametrize("level", ["memory", "local"])
def test_a_level_that_does_not_hold_what_is_mixed_reads_records_alone(
    tars: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, level: str
) -> None:
    """It says so; in order, or with records that are mixed near each other, blocks are read."""
    small: dict[str, Any] = {"memory": 2 * BLOCK}
    if level == "local":
        small = {"memory": 0, "local": tmp_path, "cache_limit": 2 * BLOCK + (1 << 16)}
    for order, told in (({"seed": 1}, 1), ({"seed": None}, 0), ({"mix": 1}, 0)):
        caplog.clear()
        with (
            Records(tars, **small) as records,
            Loader(records, 3, decode=number_of, **order) as loader,
        ):
            before = records.counters().storage
            for _ in range(3):
                numbers = [number for batch in loader for number in batch["number"].tolist()]
                assert sorted(numbers) == list(range(SAMPLES))
            if told:
                assert records.counters().storage - before < 3.5 * size_of(tars)
        assert len(caplog.records) == told
    assert "Loader(mix=1)" in caplog.text or not told


def test_a_cache_that_cannot_be_made_is_told_once_and_storage_is_read(
    tars: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Records(tars, local="/proc/cache", memory=0) as records:
        right(records)
        assert records.counters().disk == 0
        assert records.counters().storage < 2 * size_of(tars)
    [record] = caplog.records
    assert "the disk cache in /proc/cache keeps no" in record.getMessage()


def test_a_file_that_changed_is_another(tmp_path: Path) -> None:
    for number in (0, 1):
        np.save(tmp_path / "a.npy", np.full(9, number))
        os.utime(tmp_path / "a.npy", (number, number))
        with Records(tmp_path / "a.npy", local=tmp_path / "cache") as records:
            assert records[3]["array"] == number


def test_a_copy_that_differs_from_the_first_ranks_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(BLOCK, dtype=np.uint16))

    def rank(ctx: Any) -> None:
        with Records(path, local=tmp_path / "cache", memory=0, group=ctx.world) as records:
            if ctx.rank == 1:
                os.utime(path, (1, 1))
                assert records[BLOCK - 100]["array"] == (1 << 16) - 100
                assert not (tmp_path / "cache" / records.files.digest / "1").exists()

    loopback.run(2, rank)


def test_a_cache_in_the_folder_of_its_data_is_refused(tars: Path, tmp_path: Path) -> None:
    for local in (tars, tars / "new/cache", f"{tars}/../{tars.name}"):
        with pytest.raises(ValueError, match="its blocks would be records"):
            Records(tars, local=local)
    (tmp_path / "set").symlink_to(tars)
    for local in (tmp_path / "set2", tmp_path / "set/.cache"):
        with Records([tmp_path / "set"], local=local) as records:
            right(records, [3])


def test_staging(tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["stage", str(tars), "--local", str(tmp_path / "cache")]
    assert main(arguments) == 0
    assert "30 records in 3 files (tar)" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bytes_from_storage"] == 0 and told["bytes_held"] == told["bytes"] == size_of(tars)
    with Records(tars, local=tmp_path / "cache") as records:
        right(records)
        assert records.counters().storage == 0
    assert main(["stage", str(tars), "--local", str(tmp_path / "small"), "--limit", "5M"]) == 1
    assert main(["stage", str(tmp_path / "none"), "--local", str(tmp_path / "cache")]) == 1
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize("start", full(["fork", "spawn"], quick=1))
def test_the_workers_of_a_dataloader_read_for_themselves(tars: Path, start: str) -> None:
    torch = pytest.importorskip("torch")
    with Records(tars, memory=4 * BLOCK) as records:
        records[0]
        loader = torch.utils.data.DataLoader(
            records, batch_size=None, num_workers=2, multiprocessing_context=start, timeout=60
        )
        for number, record in enumerate(loader):
            assert record == sample(number)


def test_an_index_is_kept_and_a_damaged_one_made_anew(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned: list[TarHeaders] = []
    steps = TarHeaders.steps

    def counted(self: TarHeaders) -> Any:
        scanned.append(self)
        return steps(self)

    monkeypatch.setattr(TarHeaders, "steps", counted)
    # In its head, and in what says how long it is.
    for n_scans, damaged in ((3, None), (3, 20), (6, -1), (9, None), (9, None)):
        with Records(tars, local=tmp_path) as records:
            right(records, [4, 29])
            behind = str(-(-records.files.nbytes // BLOCK) + _LAYOUT)
        assert len(scanned) == n_scans
        index = tmp_path / records.files.digest / behind
        data = bytearray(index.read_bytes())
        if damaged is not None:
            data[damaged] ^= 1
            index.write_bytes(data)


def small(number: int) -> dict[str, Any]:
    return {"__key__": f"{number}", "x": bytes(number % 700), "cls": b"%d" % number}


@pytest.fixture
def small_tars(tmp_path: Path) -> list[Path]:
    """Three tars of 400 samples each."""
    paths = [tmp_path / f"{number}.tar" for number in range(3)]
    for k, path in enumerate(paths):
        samples = map(small, range(400 * k, 400 * k + 400))
        members = [
            (f"{each['__key__']}.{name}", each[name]) for each in samples for name in ("x", "cls")
        ]
        path.write_bytes(tar_of(members))
    return paths


def test_announced_records_that_lie_together_are_one_range(
    small_tars: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[tuple[str, int, int]] = []
    monkeypatch.setattr(
        Storage, "announce", lambda self, file, *part: announced.append((file.url, *part))
    )
    with Records(small_tars) as records:
        records.announce([3, 4, 5, 300, 301, 2, 410])
        wanted = [(3, 5), (300, 301), (2, 2), (410, 410)]
        for found, (first, last) in zip(announced, wanted, strict=True):
            bounds = [
                records.files.locate(at)
                for row in (first, last)
                for at, _ in records._index.all.ranges(row)
            ]
            assert found[0] == records.files[bounds[0][0]].url and found[1] == bounds[0][1]
            ((begin, nbytes),) = records._index.all.ranges(last)
            assert sum(found[1:]) == records.files.locate(begin)[1] + nbytes
        records.announce([])
        assert len(announced) == len(wanted)


class Gate:
    """Reads of the last tar wait until it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached, fill = threading.Event(), threading.Event(), Storage.fill

        def gated(storage: Storage, file: File, offset: int, out: memoryview) -> None:
            if file.url.endswith("2.tar"):
                self.reached.set()
                assert self.open.wait(60)
            fill(storage, file, offset, out)

        monkeypatch.setattr(Storage, "fill", gated)


def numbered(record: dict[str, Any], random: Any) -> dict[str, Any]:
    number = int(record["cls"])
    assert record == small(number)
    return {"number": number}


@pytest.mark.parametrize("last", ["drop", "fill"])
@pytest.mark.parametrize("memory", [0, 64 * BLOCK])
def test_batches_in_order_come_before_the_index_is_there(
    small_tars: list[Path], monkeypatch: pytest.MonkeyPatch, last: Any, memory: int
) -> None:
    gate = Gate(monkeypatch)
    options = {"decode": numbered, "seed": None, "last": last, "ahead": 1}
    if memory:
        gate.open.set()  # the three lie in one block
    with Records(small_tars, memory=memory) as records, Loader(records, 90, **options) as loader:
        batches, found = iter(loader), []
        for _ in range(5):
            found.append(next(batches)["number"].copy())
        assert records[410] == small(410) and "1.tar, byte" in records.place(410)
        gate.open.set()
        found += [batch["number"].copy() for batch in batches]
        assert len(loader) == len(found) == (13 if last == "drop" else 14)
        end = range(90 * len(loader))
        assert np.array_equal(np.concatenate(found), np.take(range(1200), end, mode="wrap"))
        assert len(records) == 1200
        assert np.array_equal(next(iter(loader))["number"], np.arange(90))
        for wrong in (-1, 1200):
            with pytest.raises(IndexError, match="there are 1200"):
                records[wrong]


@pytest.mark.parametrize("size", [2, 3, *full([5, 7])])
def test_a_group_begins_before_its_index_is_there(
    small_tars: list[Path], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Each record comes once, and those behind the last to fill its batch."""
    gate = Gate(monkeypatch)
    options = {"decode": numbered, "seed": None, "last": "fill", "ahead": 1}

    def rank(ctx: Any) -> list[Any]:
        with (
            Records(small_tars, group=ctx.world) as records,
            Loader(records, 105, **options) as loader,
        ):
            batches = iter(loader)
            found = [next(batches)["number"].copy() for _ in range(3)]
            ctx.barrier()
            gate.open.set()
            found += [batch["number"].copy() for batch in batches]
            assert len(records) == 1200
            return found

    parts = loopback.run(size, rank)
    found = np.concatenate([np.concatenate(each) for each in zip(*parts, strict=True)])
    assert np.array_equal(found, np.take(range(1200), range(12 * 105), mode="wrap"))


def test_a_group_shares_the_work_of_an_index(
    small_tars: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned, scan = [], Tar.scan
    monkeypatch.setattr(
        Tar, "scan", lambda files, number, read: scanned.append(number) or scan(files, number, read)
    )

    def rank(ctx: Any) -> list[int]:
        with (
            Records(small_tars, group=ctx.world) as records,
            Loader(records, 90, decode=numbered, seed=3) as loader,
        ):
            return next(iter(loader))["number"].tolist()

    parts = loopback.run(2, rank)
    assert sorted(scanned) == [0, 1, 2]
    assert [*parts[0], *parts[1]] == Batches(1200, 90, seed=3).rows(0).tolist()


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("remote", ["0.tar", "1.tar"], r"0\.tar"),
        ("format", ["tar", None], "input, format"),
        ("batch", [8, 9], "batch 8, .* batch 9"),
        ("seed", [0, 1], "seed 0, .* seed 1"),
        ("seed", [None, 0], "seed None, .* seed 0"),
        ("mix", [None, 1], "mix None"),
    ],
)
def test_ranks_that_give_other_arguments(
    small_tars: list[Path], name: str, values: list[Any], told: str
) -> None:
    def rank(ctx: Any) -> None:
        given = {"remote": "0.tar", "format": None, "batch": 8, "seed": 1, "mix": None}
        given[name] = values[ctx.rank]
        remote = small_tars[0].parent / given.pop("remote")
        with (
            Records(remote, format=given.pop("format"), group=ctx.world) as records,
            Loader(records, decode=numbered, **given),
        ):
            pass

    with pytest.raises(MismatchError, match=told):
        loopback.run(2, rank)


def test_names_without_an_order(small_tars: list[Path]) -> None:
    for wrong in ({*small_tars}, small_tars[0].parent.glob("*.tar")):
        with pytest.raises(TypeError, match="sort it"):
            Records(wrong)  # type: ignore[arg-type]
    for empty in ("", [small_tars[0], ""]):
        with pytest.raises(ValueError, match="no character"):
            Records(empty)
    names = [*small_tars]
    with Records(names) as records:
        names.clear()
        with pickle.loads(pickle.dumps(records)) as other:
            assert len(other) == 1200


def test_a_tar_that_is_damaged_behind_the_first_records(small_tars: list[Path]) -> None:
    data = bytearray(small_tars[2].read_bytes())
    data[0] ^= 1
    small_tars[2].write_bytes(data)
    with Records(small_tars) as records:
        with pytest.raises(DataError, match=r"2\.tar, byte 0: a damaged tar"):
            Loader(records, 90, decode=numbered)  # any of the records may come first
        with Loader(records, 90, decode=numbered, seed=None) as loader:
            batches = iter(loader)
            for k in range(8):
                assert np.array_equal(next(batches)["number"], np.arange(90 * k, 90 * k + 90))
            with pytest.raises(DataError, match=r"2\.tar, byte 0: a damaged tar"):
                list(batches)
    small_tars[0].write_bytes(data)
    with pytest.raises(DataError, match=r"0\.tar, byte 0: a damaged tar"):
        Records(small_tars)
    with pytest.raises(DataError, match=r"0\.tar, byte 0: a damaged tar"):
        loopback.run(2, lambda ctx: Records(small_tars, group=ctx.world))


def test_a_record_after_the_end(small_tars: list[Path]) -> None:
    """At once, with a level of memory, too; the end of a process waits for no load."""
    before = {*threading.enumerate()}
    with Records(small_tars, memory=4 * BLOCK, timeout=1e6) as records:
        loaders = {*threading.enumerate()} - before
        assert loaders and all(each.daemon for each in loaders)
        shelf = records._levels._memory.shelf
        shelf.entries[0] = 0  # it is not there
        shelf._held.clear()
    assert not any(each.is_alive() for each in loaders)
    with pytest.raises(ClosedError):
        records[3]


def test_the_number_of_records_after_the_end(small_tars: list[Path]) -> None:
    with Records(small_tars) as records:
        assert records[5] == small(5)
    with pytest.raises(ClosedError):
        len(records)


def test_a_fork_makes_the_index_for_itself(
    small_tars: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with Records(small_tars) as records:
        fork = multiprocessing.get_context("fork")
        answer = fork.SimpleQueue()

        def child() -> None:
            gate.open.set()
            answer.put((len(records), records[1100]["cls"]))

        counting = threading.Thread(target=lambda: len(records))  # it has the locks meanwhile
        counting.start()
        assert gate.reached.wait(60)
        process = fork.Process(target=child)
        process.start()
        assert answer.get() == (1200, b"1100")
        process.join()
        gate.open.set()
        counting.join()
        assert len(records) == 1200


def first_field(sample: dict[str, Any], random: Any = None) -> dict[str, Any]:
    if sample["bin"] == b"bad":
        raise ValueError("no picture")
    return {"data": np.frombuffer(sample["bin"], np.uint8)}


def tar_of_small(path: Path, count: int, bad: set[int]) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(count):
            data = b"bad" if number in bad else number.to_bytes(4, "little")
            info = tarfile.TarInfo(f"s{number:06}.bin")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def test_skipped_records_are_those_that_webdataset_skips(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    tar_of_small(tmp_path / "a.tar", 60, {0, 7, 8, 59})
    samples = webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)
    theirs = samples.map(first_field, handler=webdataset.ignore_and_continue)
    with (
        Records(tmp_path / "a.tar") as records,
        Loader(records, 6, decode=first_field, seed=None, on_error="skip") as loader,
    ):
        ours = np.concatenate([batch["data"].copy() for batch in loader])
        assert np.array_equal(ours, np.stack([sample["data"] for sample in theirs]))
        assert loader.skipped.keys() == {0, 7, 8, 59}
        assert "s000007: ValueError: no picture" in loader.skipped[7]


@pytest.mark.full
@pytest.mark.parametrize("kept", [False, True])
def test_the_first_batch_beside_webdatasets(tmp_path: Path, kept: bool) -> None:
    """What it takes is told, with an index that is made, and with one that was kept."""
    webdataset = pytest.importorskip("webdataset")
    tar_of_small(tmp_path / "a.tar", 3000, set())
    local = {"local": tmp_path / "cache"} if kept else {}
    if kept:
        with Records(tmp_path / "a.tar", **local) as records:
            records.stage()
    taken: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(9):
        begun = time.perf_counter()
        with (
            Records(tmp_path / "a.tar", **local) as records,
            Loader(records, 100, decode=first_field) as loader,
        ):
            ours = next(iter(loader))["data"].copy()
            taken["ours"].append(time.perf_counter() - begun)
        begun = time.perf_counter()
        samples = webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)
        theirs = next(iter(samples.shuffle(1000).map(first_field).batched(100)))["data"]
        taken["theirs"].append(time.perf_counter() - begun)
        assert ours.shape == np.asarray(theirs).shape == (100, 4)
    median = {name: statistics.median(each) for name, each in taken.items()}
    what = f"first batch of a tar, index {'kept' if kept else 'made'}; 1.2 of webdataset's"
    took(what, median["ours"], 1.2 * median["theirs"])


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=4, max_size=40),
    st.integers(1, 4),
    st.integers(0, 30),
    st.none() | st.integers(0, 5),
)
def test_the_next_use_of_a_block(
    extents: list[tuple[int, int]], batch: int, iteration: int, seed: int | None
) -> None:
    """It is what reading on shows."""
    first = np.array([begin for begin, _ in extents])
    last = first + np.array([length for _, length in extents])
    batches = Batches(len(extents), batch, seed=seed)
    found = NextUse(batches, lambda: (first, last))
    found.iteration = iteration
    now = max(iteration - _BEHIND, 0)
    end = (now // batches.per_epoch + 2) * batches.per_epoch
    for block in range(13):
        uses = (
            k
            for k in range(now, end)
            if any(first[row] <= block <= last[row] for row in batches.whole(k))
        )
        assert found(block) == next(uses, float("inf"))
