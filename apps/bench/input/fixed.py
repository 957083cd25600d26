"""Records of one size in striped files: ours, PyTorch's DataLoader, and two lower limits."""

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
from pgasdl.input import Iterations, Prefetcher, StripedFiles, StripedWriter


def written(folder: Path, *, records: int, side: int, files: int, stripe: int) -> Path:
    """Write random images, each file into a folder of its own; a label is the record's number."""
    index = folder / f"images-{files}.json"
    paths = [f"{files}-{number}/images.npy" for number in range(files)]
    for path in paths:
        (folder / path).parent.mkdir()
    dtype = [("image", "u1", (3, side, side)), ("label", "i8")]
    chance = np.random.default_rng(0)
    with StripedWriter(index, dtype, files=paths, stripe=stripe) as writer:
        for first in range(0, records, 64):
            labels = np.arange(first, min(first + 64, records))
            shape = (len(labels), 3, side, side)
            writer.append({"image": chance.integers(0, 256, shape, np.uint8), "label": labels})
    return index


def paths_of(index: Path) -> list[Path]:
    """Return the files of a set."""
    return sorted(index.parent.glob(f"{index.stem.rpartition('-')[2]}-*/images.npy"))


def readers(
    ctx: pgasdl.Context, index: Path, iterations: Iterations, workers: Sequence[int]
) -> list[Reader]:
    """Return the rows, ours first."""
    files = StripedFiles(index)
    segment = ctx.segment(Prefetcher.nbytes(files, iterations))
    found = [
        Reader("Prefetcher", partial(_prefetcher, files, iterations, None)),
        Reader("Prefetcher, segment", partial(_prefetcher, files, iterations, segment)),
        Reader("memcpy", partial(_memcpy, files, iterations), ordered=False),
        Reader("sequential read", partial(_sequential, files, iterations, index), ordered=False),
    ]
    for n in workers:
        whole = {"sampler": iterations, "batch_size": None, "num_workers": n}
        each = {"batch_sampler": iterations, "num_workers": n}
        found += [
            Reader(f"DataLoader, {n} workers", partial(_dataloader, files, whole)),
            Reader(f"DataLoader by record, {n} workers", partial(_dataloader, files, each)),
        ]
    return found


def _prefetcher(files: StripedFiles, iterations: Iterations, memory: Any) -> Iterator[Batch]:
    with Prefetcher(files, iterations, memory=memory) as ahead:
        for batch in ahead:
            yield {name: torch.from_numpy(array) for name, array in batch.items()}


def _memcpy(files: StripedFiles, iterations: Iterations) -> Iterator[Batch]:
    """The same batch, copied each time."""
    source = files[iterations.batches.rows(0)]
    target = {name: array.copy() for name, array in source.items()}
    for _ in iterations:
        for name, array in source.items():
            target[name][...] = array
        yield target


def _sequential(files: StripedFiles, iterations: Iterations, index: Path) -> Iterator[Batch]:
    """As many bytes as a batch has, one after another, file after file."""
    buffer = np.zeros(iterations.batches.largest * files.dtype.itemsize, np.uint8)
    for path in cycle(paths_of(index)):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer.data) == buffer.nbytes:
                yield {"image": buffer}


def _dataloader(files: StripedFiles, options: dict[str, Any]) -> Iterator[Batch]:
    """Whole batches, read by ``files[rows]``, or records by ``files[i]``, which it collates."""
    yield from DataLoader(files, **options)
