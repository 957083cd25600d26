"""The benchmark of readers: each reader's batches, and the command as a user starts it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from support.places import APPS

from pgasdl import loopback
from pgasdl.input import Batches

pytest.importorskip("torch")
pytest.importorskip("skimage")
pytest.importorskip("sklearn")
Image = pytest.importorskip("PIL.Image")

N_PICTURES = 12


@pytest.fixture(scope="module", autouse=True)
def apps() -> Iterator[None]:
    sys.path.insert(0, str(APPS))
    yield
    sys.path.remove(str(APPS))


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    from bench.input.pictures import written

    return written(tmp_path_factory.mktemp("pictures"), N_PICTURES, 2)


def test_every_reader_gives_the_right_pictures(tars: list[Path]) -> None:
    pytest.importorskip("webdataset")
    from bench.input.decoders import readers
    from bench.input.pictures import SIDE, decode

    jpegs = [(tars[0].parent / "jpegs" / f"{row:06}.jpg").read_bytes() for row in range(N_PICTURES)]
    assert len(set(jpegs)) == N_PICTURES
    images = [decode({"jpg": jpeg, "cls": "0"})["image"] for jpeg in jpegs]
    assert images[0].shape == (SIDE, SIDE, 3)
    iterations = Batches(N_PICTURES, 4, last="fill").iterations(0, 7)

    def check(ctx: Any) -> list[str]:
        found = readers(ctx, tars, iterations, [0, 1])
        for reader in found:
            seen: list[int] = []
            source = reader.batches()
            for rows, batch in zip(iterations, source, strict=False):
                labels = np.asarray(batch["label"]).tolist()
                for label, image in zip(labels, np.asarray(batch["image"]), strict=True):
                    assert np.array_equal(image, images[label]), reader.name
                assert not reader.ordered or labels == rows.tolist(), reader.name
                seen += labels
            del batch
            source.close()  # type: ignore[attr-defined]
            assert len(seen) == 28 and set(seen) == set(range(N_PICTURES)), reader.name
        return [reader.name for reader in found]

    [names] = loopback.run(1, check)
    assert names == [
        "Loader, 0 threads", "Loader, 1 threads", "Loader, 1 processes",
        "DataLoader, 0 workers", "DataLoader, 1 workers",
        "webdataset, 0 workers", "webdataset, 1 workers", "plain loop",
    ]  # fmt: skip


def test_wrong_batches_get_no_figures() -> None:
    from bench.input.measure import Reader, use

    def nothing() -> Iterator[dict[str, Any]]:
        yield from ()

    batch = {"label": np.array([1, 2]), "image": np.zeros(8, np.uint8)}
    use(Reader("right", nothing), batch, np.array([1, 2]))
    use(Reader("mixed by itself", nothing, ordered=False), batch, np.array([2, 1]))
    with pytest.raises(SystemExit, match="wrong: another batch"):
        use(Reader("wrong", nothing), batch, np.array([2, 1]))


def test_pictures_are_the_size_that_was_asked_for(tars: list[Path]) -> None:
    from bench.input.pictures import SIZE, decode

    jpeg = (tars[0].parent / "jpegs" / "000003.jpg").read_bytes()
    with Image.open(io.BytesIO(jpeg)) as picture:
        assert picture.size == SIZE
    assert decode({"jpg": jpeg, "cls": b"7"}, side=9)["image"].shape == (9, 9, 3)
    assert decode({"jpg": jpeg, "cls": b"7"})["label"] == 7


def measured(kind: str, arguments: str, tmp_path: Path) -> dict[str, Any]:
    """Run it on two ranks, with as little as possible, and return its figures."""
    common = "--rounds 1 --compute 0.1 --cold --json --folder"
    out = jobs.run(
        2, APPS / "input_bench.py", kind, *arguments.split(), *common.split(), str(tmp_path)
    )
    document: dict[str, Any] = json.loads(
        "".join(line.removeprefix("[0] ") for line in out.splitlines(True))
    )
    for row in document["rows"]:
        for name in ("samples_per_s", "ms", "first_ms", "wait_ms"):
            assert row[name] > 0, name
    assert document["ranks"] == 2
    assert not list(tmp_path.iterdir()), "nothing stays"
    return document


def test_records(tmp_path: Path) -> None:
    """One table of all numbers of files."""
    options = "--records 48 --side 8 --batches 4 --batch 8 --workers 0,1 --files 1,3"
    rows = measured("records", options, tmp_path)["rows"]
    assert {row["files"] for row in rows} == {1, 3}
    names = {row["reader"] for row in rows}
    assert {"memcpy", "sequential read", "Prefetcher", "Prefetcher, segment"} <= names
    assert {"DataLoader, 0 workers", "DataLoader by record, 1 workers"} <= names


def test_pictures(tmp_path: Path) -> None:
    """Two ranks read the data set once, and once for each epoch where they keep nothing."""
    document = measured("pictures", "--records 16 --tars 2 --batches 1 --batch 2 --workers 0",
                        tmp_path)  # fmt: skip
    storage = document["storage"]
    assert storage["epochs"] == 2
    assert storage["memory"] == pytest.approx(1, abs=0.05)
    assert storage["none"] == pytest.approx(2, abs=0.1)
    names = [row["reader"] for row in document["rows"]]
    assert names[0] == "Loader, 0 threads" and names[-1] == "plain loop"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("", "required"),
        ("letters", "invalid choice"),
        ("records --files 1,100", "one batch in every file"),
        ("pictures --files 3", "unrecognized"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], arguments: str, word: str) -> None:
    import input_bench

    with pytest.raises(SystemExit) as ended:
        input_bench.options(arguments.split())
    assert ended.value.code == 2
    assert word in capsys.readouterr().err
