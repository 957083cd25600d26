"""The loader: epochs, ranks, states, errors; what users of torch's DataLoader expect."""

from __future__ import annotations

import gc
import io
import json
import multiprocessing
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from input_tools import Encoded, decode, decoded, records, right, same, saved
from support.patience import until

from pgasdl import BufferRefusedError, ClosedError, Context, DataError, PgasTimeoutError, loopback
from pgasdl.input import Batches, Records
from pgasdl.input.loader import Loader


def left() -> list[Any]:
    """Threads and processes that loaders have."""
    there = [*threading.enumerate(), *multiprocessing.active_children()]
    return [each for each in there if each.name.startswith(("pgasdl-prefetcher", "pgasdl-decode"))]


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = left()
    yield
    assert until(lambda: not set(left()) - set(before), 20)


def group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=rank, size=size)


def joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def some(loader: Loader, count: int) -> list[dict[str, np.ndarray]]:
    """Copies of the next batches, over the ends of epochs."""
    batches: list[dict[str, np.ndarray]] = []
    while len(batches) < count:
        for batch in loader:
            batches.append({name: array.copy() for name, array in batch.items()})
            if len(batches) == count:
                break
    return batches


def are_right(
    records: Encoded, batch: int, sizes: list[tuple[int, int]], seed: int = 0, **options: Any
) -> None:
    """Train some iterations on some ranks, then on others, from the state of before."""
    plain = Batches(len(records), batch, seed=seed, last=options.get("last", "drop"))
    state, iteration = None, 0
    for size, count in sizes:
        parts = []
        states = []
        for rank in range(size):
            options["group"] = group(rank, size)
            with Loader(records, batch, decode=decode, seed=seed, **options) as loader:
                if state:
                    loader.load_state_dict(state)
                parts.append(some(loader, count))
                states.append(loader.state_dict())
        for number, each in enumerate(zip(*parts, strict=True), iteration):
            same(joined(list(each)), decoded(records, plain.whole(number), number, seed))
        iteration += count
        state = states[0]
        assert states == [state] * size
        assert state == {
            "iteration": iteration,
            "seed": seed,
            "batch": batch,
            "records": len(records),
            "last": options.get("last", "drop"),
            "mix": None,
            "files_in_order": None,
        }


@settings(max_examples=25, deadline=None)
@given(
    n_records=st.integers(8, 40),
    batch=st.integers(4, 8),
    seed=st.integers(0, 3),
    last=st.sampled_from(["drop", "fill"]),
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=3),
    workers=st.sampled_from([0, 1, 3]),
    depth=st.integers(2, 4),
)
def test_the_same_batches_for_any_ranks_and_workers(
    n_records: int,
    batch: int,
    seed: int,
    last: str,
    sizes: list[tuple[int, int]],
    workers: int,
    depth: int,
) -> None:
    records = Encoded(n_records)
    are_right(records, batch, sizes, seed, last=last, workers=workers, depth=depth)


@pytest.mark.parametrize(
    ("workers", "before", "after"),
    [
        (1, 1, 2),
        (3, 1, 1),
        pytest.param(1, 3, 4, marks=pytest.mark.full),
        pytest.param(3, 2, 3, marks=pytest.mark.full),
        pytest.param(3, 4, 1, marks=pytest.mark.full),
    ],
)
def test_the_same_batches_from_processes(workers: int, before: int, after: int) -> None:
    are_right(Encoded(23), 5, [(before, 2), (after, 4)], 1, workers=workers, processes=True)


def test_from_2_ranks_to_3_in_mid_epoch() -> None:
    are_right(Encoded(50), 6, [(2, 5), (3, 10)])


def numbers(loader: Loader) -> list[int]:
    return [number for batch in loader for number in batch["label"].tolist()]


def test_each_loop_is_an_epoch() -> None:
    plain = Batches(23, 5, seed=2)
    with Loader(Encoded(23), 5, decode=decode, seed=2) as loader:
        assert len(loader) == 4
        for epoch in range(3):
            assert loader.state_dict()["iteration"] == 4 * epoch
            whole = [plain.whole(number) for number in range(4 * epoch, 4 * epoch + 4)]
            assert numbers(loader) == np.concatenate(whole).tolist()


def test_a_loop_that_is_left_is_continued() -> None:
    plain = Batches(23, 5)
    with Loader(Encoded(23), 5, decode=decode) as loader:
        for place, batch in enumerate(loader):
            assert loader.state_dict()["iteration"] == place + 1
            assert batch["label"].tolist() == plain.whole(place).tolist()
            if place == 1:
                break
        assert numbers(loader) == np.concatenate([plain.whole(2), plain.whole(3)]).tolist()
        assert len(numbers(loader)) == 20
        assert next(iter(loader))["label"].tolist() == plain.whole(8).tolist()


def test_states_that_are_refused() -> None:
    records = Encoded(23)
    with Loader(records, 5, decode=decode, seed=1) as loader:
        before = some(loader, 2)
        state = loader.state_dict()
        for change, text in (
            ({"seed": 2}, "seed is 2, this loader's 1"),
            ({"batch": 6}, "batch is 6, this loader's 5"),
            ({"records": 24}, "records is 24, this loader's 23"),
            ({"iteration": -1}, "iteration is -1"),
        ):
            with pytest.raises(ValueError, match=text):
                loader.load_state_dict({**state, **change})
        with pytest.raises(ValueError, match="without batch, seed"):
            loader.load_state_dict({"iteration": 1, "records": 23})
        assert loader.state_dict() == state
        after = some(loader, 1)  # it goes on
        same(after[0], decoded(records, Batches(23, 5, seed=1).whole(2), 2, 1))
        loader.load_state_dict({**state, "iteration": 0})
        for first, second in zip(before, some(loader, 2), strict=True):
            same(second, first)


def test_a_state_of_another_order_is_refused(tmp_path: Path) -> None:
    """A copy of the files, and a state of an earlier version, go on."""
    paths = saved(tmp_path, records(43))
    copies = [
        Path(shutil.copytree(path.parent, tmp_path / f"copy/{path.parent.name}")) / "set.npy"
        for path in paths
    ]
    with Records(paths) as found, Loader(found, np.int64(10), seed=np.int64(1)) as loader:
        some(loader, 1)
        state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    for names, options, told in (
        (paths[::-1], {}, "files_in_order"),
        (paths, {"last": "fill"}, "last is drop, this loader's fill"),
        (paths, {"mix": 1}, "mix is None, this loader's 1"),
        (copies, {}, None),
    ):
        with Records(names) as found, Loader(found, 10, seed=1, **options) as loader:
            if told:
                with pytest.raises(ValueError, match=told):
                    loader.load_state_dict(state)
            else:
                for given in (
                    state,
                    {name: state[name] for name in ("iteration", "seed", "batch", "records")},
                ):
                    loader.load_state_dict(given)
                    assert loader.state_dict() == state


def test_a_state_that_is_loaded_within_a_loop() -> None:
    with Loader(Encoded(20), 5, decode=decode) as loader:
        state = {**loader.state_dict(), "iteration": 6}
        plain = Batches(20, 5)
        for batch in loader:
            assert batch["label"].tolist() == plain.whole(0).tolist()
            loader.load_state_dict(state)
        assert numbers(loader) == np.concatenate([plain.whole(6), plain.whole(7)]).tolist()


def test_the_next_epoch_is_read_before_it_begins() -> None:
    records = Encoded(20)
    with Loader(records, 5, decode=decode, depth=3, ahead=2) as loader:
        assert not left()[1:]  # lazily: nothing is read but record 0
        numbers(loader)
        # The thread has filled all buffers and announced two batches more, and one is tried.
        assert until(lambda: len(records.announced) == 4 + 3 + 2 + 1)
        plain = Batches(20, 5)
        assert records.announced == [plain.whole(number).tolist() for number in range(10)]


def test_batches_lie_in_a_segment() -> None:
    records = Encoded(23)

    def program(ctx: Context) -> None:
        made = []

        def segment(nbytes: int) -> Any:
            made.append(ctx.segment(nbytes))
            return made[0]

        with Loader(records, 6, decode=decode, group=ctx.world, memory=segment) as loader:
            memory = made[0].numpy()
            plain = Batches(23, 6, rank=ctx.rank, size=ctx.size)
            for number, batch in enumerate(loader):
                assert all(np.shares_memory(array, memory) for array in batch.values())
                same(batch, decoded(records, plain.rows(number), number))
            del batch
            loader.load_state_dict({**loader.state_dict(), "iteration": 1})
            same(next(iter(loader)), decoded(records, plain.rows(1), 1))

    loopback.run(2, program)


def test_records_that_need_no_decoding(data: Records) -> None:
    memory = np.zeros(4096, np.uint8)
    with Loader(data, 10, group=group(1, 2), memory=memory) as loader:
        plain = Batches(43, 10, rank=1, size=2)
        for number, batch in enumerate(loader):
            right(batch, plain.rows(number))
            assert np.shares_memory(batch["image"], memory)
        assert number == 3
        del batch


@pytest.mark.parametrize("workers", [1, 2])
def test_a_decode_that_changes_its_record_changes_no_other(data: Records, workers: int) -> None:
    """Nor the same record, when a batch has it twice."""

    def inverted(record: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        return {"image": np.invert(record["image"], out=record["image"])}

    options: dict[str, Any] = {"seed": None, "last": "fill", "workers": workers}
    with Loader(data, 50, decode=inverted, **options) as loader:
        rows = loader._batches.rows(0)
        assert np.array_equal(next(iter(loader))["image"], ~records(43)["image"][rows])


def test_the_order_keeps_to_chunks() -> None:
    records: Any = Encoded(60)
    records.chunks = np.arange(60) // 2
    with Loader(records, 6, decode=decode, seed=5, mix=16) as loader:
        found = numbers(loader)
    plain = Batches(60, 6, seed=5, chunks=records.chunks)
    assert found == np.concatenate([plain.whole(number) for number in range(10)]).tolist()
    assert len({number // 2 for number in found[:32]}) == 16


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        ({"decode": None}, DataError, "pass decode"),
        ({"batch": 24}, ValueError, "leaves no batch"),
        ({"group": group(2, 2)}, ValueError, "rank 2 of 2"),
        ({"depth": 1}, ValueError, "depth 1"),
        ({"workers": -1}, ValueError, "-1 workers"),
        ({"seed": 1.5}, TypeError, "integer"),
        ({"batch": 5.0}, TypeError, "integer"),
        ({"memory": np.zeros(9, np.uint8)}, BufferRefusedError, "9 bytes"),
    ],
)
def test_arguments_that_are_refused(wrong: dict[str, Any], kind: Any, text: str) -> None:
    options = {"batch": 5, "decode": decode, **wrong}
    with pytest.raises(kind, match=text):
        Loader(Encoded(23), **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_is_raised_and_the_next_loop_tries_again(workers: int) -> None:
    damaged = True
    bad = int(Batches(20, 5).whole(2)[3])
    assert bad

    def fails(record: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        if record["number"] == bad and damaged:
            raise ValueError("damaged")
        return decode(record, random)

    records = Encoded(20)
    with Loader(records, 5, decode=fails, workers=workers) as loader:
        for _ in range(2):
            with pytest.raises(DataError, match=rf"record {bad} \(mem://.*: ValueError: damaged"):
                numbers(loader)
            assert loader.state_dict()["iteration"] == 2
        damaged = False
        plain = Batches(20, 5)
        assert numbers(loader) == np.concatenate([plain.whole(2), plain.whole(3)]).tolist()


class Damaged(Encoded):
    """Records of which some cannot be read, and others not be decoded."""

    def __init__(self, count: int, unread: set[int], undecoded: set[int]) -> None:
        super().__init__(count)
        self.unread = unread
        for number in undecoded:
            self.data[number] = b"bad"

    def __getitem__(self, row: int) -> dict[str, Any]:
        if row in self.unread:
            raise DataError(f"{self.place(row)}: damaged")
        return {"__key__": f"key{row}", **super().__getitem__(row)}


def picky(record: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    if record["data"] == b"bad":
        raise ValueError("no picture")
    found = decode(record, random)
    return {**found, "label": [1, 2]} if record["number"] == 12 else found


@pytest.mark.parametrize(("workers", "as_processes"), [(0, False), (3, False), (2, True)])
def test_bad_records_are_skipped_counted_and_named(
    workers: int, as_processes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    records = Damaged(23, {0, 7}, {1, 5, 22})
    bad = {0, 1, 5, 7, 12, 22}
    options: dict[str, Any] = {"workers": workers, "processes": as_processes, "last": "fill"}
    with Loader(records, 8, decode=picky, on_error="skip", **options) as loader:
        for _ in range(2):
            for batch in loader:
                number = loader.state_dict()["iteration"] - 1
                rows = [row for row in Batches(23, 8, last="fill").whole(number) if row not in bad]
                same(batch, decoded(records, rows, number))
        assert loader.skipped.keys() == bad and len(caplog.messages) == len(bad)
        assert "byte 0: damaged" in loader.skipped[0]
        assert loader.skipped[5].startswith("record 5 (mem://set, byte ")
        assert loader.skipped[5].endswith("), key5: ValueError: no picture")
        assert "label is int64 of shape (2,), and of record 2 patch" in loader.skipped[12]
    with pytest.raises(DataError, match="byte 0: damaged"):
        Loader(records, 8, decode=picky)
    with pytest.raises(ValueError, match='on_error=1: there are "raise"'):
        Loader(records, 8, decode=picky, on_error=1)  # type: ignore[arg-type]


def test_parts_of_a_batch_without_a_good_record() -> None:
    records = Damaged(40, set(range(20)), {30})
    with pytest.raises(DataError, match="damaged"):  # something is wrong with all
        Loader(records, 4, decode=picky, on_error="skip")
    records.unread = set(range(4, 8))
    with Loader(records, 4, decode=picky, seed=None, on_error="skip") as loader:
        with pytest.raises(DataError, match="iteration 1: no record of it is good"):
            numbers(loader)
        assert len(numbers(loader)) == 40 - 8 - 1 - 1  # it goes on behind; 12 is unlike the rest
    with Loader(records, 1, decode=picky, seed=None, on_error="skip") as loader:
        for _ in range(2):  # a batch of one is left out
            assert numbers(loader) == [k for k in range(40) if k not in (4, 5, 6, 7, 12, 30)]


def held_up(held: threading.Event) -> Loader:
    """A loader whose first batch does not come until then."""

    def slow(record: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        if record["number"]:
            assert held.wait(20)
        return {"label": record["number"]}

    return Loader(Encoded(20), 5, decode=slow, workers=2, timeout=0.05)


def test_a_batch_that_takes_long() -> None:
    held = threading.Event()
    found: list[int] = []
    with held_up(held) as loader:
        with pytest.raises(PgasTimeoutError, match="the read is not done"):
            next(iter(loader))
        held.set()
        while len(found) < 20:
            with suppress(PgasTimeoutError):
                for batch in loader:
                    found.extend(batch["label"].tolist())
    assert found == np.concatenate(list(Batches(20, 5).iterations(0, 4))).tolist()


def test_close_while_a_record_is_decoded() -> None:
    held = threading.Event()
    loader = held_up(held)
    with pytest.raises(PgasTimeoutError):
        next(iter(loader))
    with pytest.raises(PgasTimeoutError, match="still in a read"):
        loader.close()
    with pytest.raises(ClosedError):
        next(iter(loader))
    held.set()
    assert until(lambda: not left())
    loader.close()


def test_a_closed_loader() -> None:
    for begun in (False, True):
        loader = Loader(Encoded(20), 5, decode=decode)
        batch = next(iter(loader)) if begun else None
        loader.close()
        loader.close()
        with pytest.raises(ClosedError):
            next(iter(loader))
        if batch:
            same(batch, decoded(Encoded(20), Batches(20, 5).whole(0), 0))


@pytest.mark.parametrize("as_processes", [False, True])
def test_it_ends_when_nobody_has_it(as_processes: bool) -> None:
    loader = Loader(Encoded(20), 5, decode=decode, processes=as_processes)
    iterator = iter(loader)
    batch = next(iterator)
    assert len(left()) == (4 if as_processes else 1)
    del loader, iterator
    gc.collect()
    assert until(lambda: not left())
    same(batch, decoded(Encoded(20), Batches(20, 5).whole(0), 0))


class Pictures(Encoded):
    """JPEG files of parts of scikit-learn's pictures."""

    def __init__(self) -> None:
        datasets = pytest.importorskip("sklearn.datasets")
        image = pytest.importorskip("PIL.Image")
        chance = np.random.default_rng(0)
        self.data, self.announced = [], []
        for number in range(24):
            whole = datasets.load_sample_image(("china.jpg", "flower.jpg")[number % 2])
            top, side = chance.integers(0, 200), chance.integers(40, 200)
            file = io.BytesIO()
            image.fromarray(whole[top : top + side, top : top + side + 30]).save(file, "JPEG")
            self.data.append(file.getvalue())


def picture(record: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    from PIL import Image

    image = Image.open(io.BytesIO(record["data"])).convert("RGB").resize((32, 24))
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return {"image": image, "label": record["number"] % 2}


@pytest.mark.parametrize("as_processes", [False, True])
def test_pictures(as_processes: bool) -> None:
    records = Pictures()
    flipped = 0
    with Loader(records, 8, decode=picture, processes=as_processes) as loader:
        for number, batch in enumerate(loader):
            assert batch["image"].shape == (8, 24, 32, 3)
            for k, row in enumerate(Batches(24, 8).whole(number)):
                random = np.random.Generator(
                    np.random.PCG64(np.random.SeedSequence([0, number, row]))
                )
                expected = picture(records[int(row)], random)
                assert np.array_equal(batch["image"][k], np.asarray(expected["image"]))
                assert batch["label"][k] == row % 2
                plain = picture(records[int(row)], SimpleNamespace(random=lambda: 1))  # type: ignore[arg-type]
                flipped += not np.array_equal(batch["image"][k], np.asarray(plain["image"]))
    assert 4 < flipped < 20


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("count", [0, 1, 3, 4, 6])
def test_states_as_torchdatas_loader_has_them(count: int) -> None:
    """After so many batches: what a new loader with that state gives."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def theirs() -> Any:
        return torchdata.StatefulDataLoader(list(range(20)), batch_size=5)

    def taken(loader: Any, count: int) -> tuple[list[list[int]], Any]:
        batches: list[list[int]] = []
        state = loader.state_dict()
        while len(batches) < count:
            for batch in loader:
                label = batch["label"] if isinstance(batch, dict) else batch
                batches.append(label.tolist())
                if len(batches) == count and count % 4:
                    return batches, loader.state_dict()
            state = loader.state_dict()
        return batches, state

    def rest(loader: Any, state: Any) -> list[list[int]]:
        loader.load_state_dict(state)
        return [(batch["label"] if isinstance(batch, dict) else batch).tolist() for batch in loader]

    def ours() -> Loader:
        return Loader(Encoded(20), 5, decode=decode, seed=None)

    with ours() as first, ours() as second:
        given, state = taken(first, count)
        expected, their_state = taken(theirs(), count)
        assert given == expected
        assert rest(second, state) == rest(theirs(), their_state)
