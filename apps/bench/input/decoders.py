"""Pictures decoded by Pillow: ours, PyTorch's DataLoader, webdataset, and a plain loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import pgasdl
from bench.input.measure import Batch, Reader
from bench.input.pictures import decode
from pgasdl.input import Batches, Iterations, Loader, Records

_EPOCHS = 2


def readers(
    ctx: pgasdl.Context, tars: Sequence[Path], iterations: Iterations, workers: Sequence[int]
) -> list[Reader]:
    """Return the rows, ours first; without webdataset its rows are left out."""
    jpegs = tars[0].parent / "jpegs"
    ours, torchs, webs = [], [], []
    for n in workers:
        ours.append(Reader(f"Loader, {n} threads", partial(_loader, ctx, tars, iterations, n)))
        if n:
            batches = partial(_loader, ctx, tars, iterations, n, processes=True)
            ours.append(Reader(f"Loader, {n} processes", batches))
        batches = partial(_dataloader, jpegs, iterations, n)
        torchs.append(Reader(f"DataLoader, {n} workers", batches))
        if find_spec("webdataset"):
            batches = partial(_webdataset, tars, iterations, n)
            webs.append(Reader(f"webdataset, {n} workers", batches, ordered=False))
    return [*ours, *torchs, *webs, Reader("plain loop", partial(_loop, jpegs, iterations))]


def _loader(
    ctx: pgasdl.Context,
    tars: Sequence[Path],
    iterations: Iterations,
    workers: int,
    processes: bool = False,
) -> Iterator[Batch]:
    options: dict[str, Any] = {"decode": decode, "workers": workers, "processes": processes}
    with (
        Records(tars, group=ctx.world) as records,
        Loader(records, iterations.batches.batch, last="fill", **options) as loader,
    ):
        while True:
            for batch in loader:
                yield {name: torch.from_numpy(array) for name, array in batch.items()}


class _Jpegs(Dataset[dict[str, Any]]):
    """The files of a folder, a map-style data set."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return decode({"jpg": self.paths[row].read_bytes(), "cls": self.paths[row].stem})


def _dataloader(jpegs: Path, iterations: Iterations, workers: int) -> Iterator[Batch]:
    yield from DataLoader(_Jpegs(jpegs), batch_sampler=iterations, num_workers=workers)


def _webdataset(tars: Sequence[Path], iterations: Iterations, workers: int) -> Iterator[Batch]:
    """As its documentation does it: mixed by itself, and batched in the workers."""
    import webdataset

    batches = iterations.batches
    samples = webdataset.WebDataset(
        [str(path) for path in tars],
        shardshuffle=len(tars),
        nodesplitter=partial(_part, batches.rank, batches.size),
        empty_check=False,
    )
    mixed = samples.repeat().shuffle(100).map(decode).batched(batches.largest)
    yield from webdataset.WebLoader(mixed, batch_size=None, num_workers=workers)


def _part(rank: int, size: int, urls: Any) -> Iterator[Any]:
    return islice(urls, rank, None, size)


def _loop(jpegs: Path, iterations: Iterations) -> Iterator[Batch]:
    """Open, decode, stack."""
    source = _Jpegs(jpegs)
    for rows in iterations:
        records = [source[row] for row in rows]
        yield {
            "image": np.stack([each["image"] for each in records]),
            "label": np.array([each["label"] for each in records]),
        }


def copies(ctx: pgasdl.Context, tars: Sequence[Path], batch: int) -> dict[str, Any]:
    """Read the data set twice; return what all ranks read from storage, in sizes of the data set.

    "memory": the ranks' memories keep a part each, that all together have room for all. "none":
    every rank reads for itself. Collective.
    """
    nbytes = sum(path.stat().st_size for path in tars)
    found: dict[str, Any] = {"bytes": nbytes, "epochs": _EPOCHS}
    for name, memory in (("memory", nbytes // ctx.size + (8 << 20)), ("none", 0)):
        with Records(tars, group=ctx.world, memory=memory) as records:
            batches = Batches(
                len(records), batch * ctx.size, rank=ctx.rank, size=ctx.size, last="fill"
            )
            for rows in batches.iterations(0, _EPOCHS * batches.per_epoch):
                for row in rows:
                    records[row]
            ctx.barrier(timeout=600)
            mine = np.array([float(records.counters().storage)])
        found[name] = float(ctx.world.allreduce(mine, timeout=600)[0]) / nbytes
    return found
