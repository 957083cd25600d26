"""Records for tests of ``pgasdl.input``: of one size in NumPy's files, and of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

RECORD = np.dtype([("image", "u1", (3, 5, 5)), ("label", "<i8")])


def records(count: int, dtype: np.dtype[Any] = RECORD) -> np.ndarray:
    """Some bytes that are the same each time."""
    data = np.random.default_rng(7).bytes(count * dtype.itemsize)
    return np.frombuffer(data, dtype)


def saved(folder: Path, array: np.ndarray, n_files: int = 3) -> list[Path]:
    """Files of NumPy's, each in a folder of its own, that have an array's elements in turn."""
    paths = [folder / str(number) / "set.npy" for number in range(n_files)]
    for path, part in zip(paths, np.array_split(array, n_files), strict=True):
        path.parent.mkdir()
        np.save(path, part)
    return paths


def right(batch: dict[str, np.ndarray], rows: Any) -> None:
    given = records(43)[rows]
    assert np.array_equal(batch["image"], given["image"])
    assert np.array_equal(batch["label"], given["label"])


class Encoded:
    """Records of random sizes that have to be decoded; it notes which were announced."""

    dtype = None
    chunks = None

    def __init__(self, count: int) -> None:
        chance = np.random.default_rng(count)
        self.data = [chance.bytes(int(chance.integers(1, 200))) for _ in range(count)]
        self.announced: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"data": self.data[row], "number": row}

    def announce(self, rows: Any) -> None:
        self.announced.append(list(rows))

    def place(self, row: int) -> str:
        return f"mem://set, byte {sum(map(len, self.data[:row]))}"


def decode(record: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    """Give numbers that depend on all bytes, on which record it is, and on chance."""
    data = np.frombuffer(record["data"], np.uint8)
    return {
        "patch": np.resize(data, (3, 4)) + random.integers(0, 9, (3, 4), np.uint8),
        "mean": np.float32(data.mean()),
        "label": record["number"],
    }


def decoded(records: Encoded, rows: Any, iteration: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Decode a batch by a plain loop."""
    each = []
    for row in map(int, rows):
        bits = np.random.PCG64(np.random.SeedSequence([seed, iteration, row]))
        each.append(decode(records[row], np.random.Generator(bits)))
    return {name: np.stack([np.asarray(one[name]) for one in each]) for name in each[0]}


def same(batch: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert batch.keys() == expected.keys()
    for name, array in expected.items():
        assert batch[name].dtype == array.dtype
        assert np.array_equal(batch[name], array)
