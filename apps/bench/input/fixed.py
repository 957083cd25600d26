"""Records of one size in NumPy's files: ours, PyTorch's DataLoader, and two lower limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import pgasdl
from bench.input.measure import Batch, Reader
from pgasdl.input import Iterations, Prefetcher, Records


def paths(folder: Path, files: int) -> list[Path]:
    """Return the files of a set, each in a folder of its own."""
    return [folder / f"{files}-{number}/images.npy" for number in range(files)]


def write(paths: Sequence[Path], *, records: int, side: int) -> None:
    """Write random images; a label is the record's number."""
    chance = np.random.default_rng(0)
    for path, rows in zip(paths, np.array_split(np.arange(records), len(paths)), strict=True):
        path.parent.mkdir()
        array = np.empty(len(rows), [("image", "u1", (3, side, side)), ("label", "i8")])
        array["image"] = chance.integers(0, 256, (len(rows), 3, side, side), np.uint8)
        array["label"] = rows
        np.save(path, array)


def readers(
    ctx: pgasdl.Context, paths: Sequence[Path], iterations: Iterations, workers: Sequence[int]
) -> list[Reader]:
    """Return the rows, ours first."""
    files = Records(paths)
    segment = ctx.segment(Prefetcher.nbytes(files, iterations))
    found = [
        Reader("Prefetcher", partial(_prefetcher, files, iterations, None)),
        Reader("Prefetcher, segment", partial(_prefetcher, files, iterations, segment)),
        Reader("memcpy", partial(_memcpy, files, iterations), ordered=False),
        Reader("sequential read", partial(_sequential, paths, iterations), ordered=False),
    ]
    for n in workers:
        whole = {"sampler": iterations, "batch_size": None, "num_workers": n}
        each = {"batch_sampler": iterations, "num_workers": n}
        found += [
            Reader(f"DataLoader, {n} workers", partial(_dataloader, files, whole)),
            Reader(f"DataLoader by record, {n} workers", partial(_dataloader, files, each)),
        ]
    return found


def _prefetcher(files: Records, iterations: Iterations, memory: Any) -> Iterator[Batch]:
    with Prefetcher(files, iterations, memory=memory) as ahead:
        for batch in ahead:
            yield {name: torch.from_numpy(array) for name, array in batch.items()}


def _memcpy(files: Records, iterations: Iterations) -> Iterator[Batch]:
    """The same batch, copied each time."""
    source = files[iterations.batches.rows(0)]
    target = {name: array.copy() for name, array in source.items()}
    for _ in iterations:
        for name, array in source.items():
            target[name][...] = array
        yield target


def _sequential(paths: Sequence[Path], iterations: Iterations) -> Iterator[Batch]:
    """As many bytes as a batch has, one after another, file after file."""
    record = np.load(paths[0], mmap_mode="r").itemsize
    buffer = np.zeros(iterations.batches.largest * record, np.uint8)
    for path in cycle(paths):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer.data) == buffer.nbytes:
                yield {"image": buffer}


def _dataloader(files: Records, options: dict[str, Any]) -> Iterator[Batch]:
    """Whole batches, read by ``files[rows]``, or records by ``files[i]``, which it collates."""
    yield from DataLoader(files, **options)
