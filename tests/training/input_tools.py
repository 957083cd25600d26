"""Striped files for tests of ``pgasdl.input``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pgasdl.input import StripedWriter

RECORD = np.dtype([("image", "u1", (3, 5, 5)), ("label", "<i8")])


def records(count: int, dtype: np.dtype[Any] = RECORD) -> np.ndarray:
    """Some bytes that are the same each time."""
    data = np.random.default_rng(7).bytes(count * dtype.itemsize)
    return np.frombuffer(data, dtype)


def striped(
    folder: Path, count: int, *, n_files: int = 3, stripe: int = 2, name: str = "set.json"
) -> Path:
    with StripedWriter(folder / name, RECORD, files=n_files, stripe=stripe) as writer:
        writer.append(records(count))
    return folder / name


def right(batch: dict[str, np.ndarray], rows: Any) -> None:
    given = records(43)[rows]
    assert np.array_equal(batch["image"], given["image"])
    assert np.array_equal(batch["label"], given["label"])
