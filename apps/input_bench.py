"""Measure how fast mini-batches come from striped files: pgasdl's prefetcher, PyTorch's DataLoader.

    python apps/input_bench.py --batch 16,32,64
    pgasdl run -n 2 apps/input_bench.py --cold --compute 20

Every reader gives each rank its part of the same global batches. Beside them stand a copy of a
batch between warm buffers and a sequential read of as many bytes: no reader can be faster. Rounds
are interleaved; a row has the medians. Between two batches a rank computes for ``--compute``
milliseconds, always the same number of matrix products; what an iteration takes beyond that is the
input's. CPU time is that of all processes of rank 0, their start included. ``--cold``: the files
are dropped from the page cache before every measurement.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import pgasdl
from pgasdl.input import Batches, Iterations, Prefetcher, StripedFiles, StripedWriter
from pgasdl.tools.bench.output import Output
from pgasdl.tools.bench.session import Session
from pgasdl.tools.bench.turns import Contender

N_WARM = 4  # batches before the clock runs: more than any reader has ready
Batch = dict[str, Any]
Reader = Callable[[StripedFiles, Iterations], Iterator[Batch]]


def memcpy(files: StripedFiles, iterations: Iterations) -> Iterator[Batch]:
    """The same batch, copied each time."""
    source = files[iterations.batches.rows(0)]
    target = {name: array.copy() for name, array in source.items()}
    for _ in iterations:
        for name, array in source.items():
            target[name][...] = array
        yield target


def sequential(paths: list[Path], files: StripedFiles, iterations: Iterations) -> Iterator[Batch]:
    """As many bytes as a batch has, one after another, file after file."""
    buffer = np.zeros(iterations.batches.largest * files.dtype.itemsize, np.uint8)
    for path in (paths[number % len(paths)] for number in count()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer.data) == buffer.nbytes:
                yield {"image": buffer}


def dataloader(n_workers: int, files: StripedFiles, iterations: Iterations) -> Iterator[Batch]:
    """Whole batches, read by ``files[rows]``."""
    yield from DataLoader(files, sampler=iterations, batch_size=None, num_workers=n_workers)


def by_record(n_workers: int, files: StripedFiles, iterations: Iterations) -> Iterator[Batch]:
    """Records, read by ``files[i]`` and collated by the DataLoader."""
    yield from DataLoader(files, batch_sampler=iterations, num_workers=n_workers)


def prefetcher(memory: Any, files: StripedFiles, iterations: Iterations) -> Iterator[Batch]:
    """Ours."""
    with Prefetcher(files, iterations, memory=memory) as ahead:
        for batch in ahead:
            yield {name: torch.from_numpy(array) for name, array in batch.items()}


class Work:
    """Matrix products that take some milliseconds: a fixed number, whatever else runs."""

    def __init__(self, ms: float) -> None:
        self._matrix = torch.randn(128, 128)
        self._n = 500
        took = min(self._took() for _ in range(7))
        self._n = round(ms / 1e3 / took * self._n)

    def _took(self) -> float:
        began = time.perf_counter()
        self()
        return time.perf_counter() - began

    def __call__(self) -> None:
        for _ in range(self._n):
            self._matrix @ self._matrix


def written(folder: Path, given: argparse.Namespace) -> Path:
    """Write the files, with random images; a label is the record's number."""
    index = folder / "images.json"
    dtype = [("image", "u1", (3, given.side, given.side)), ("label", "i8")]
    chance = np.random.default_rng(0)
    with StripedWriter(index, dtype, files=given.files, stripe=given.stripe) as writer:
        for first in range(0, given.records, 64):
            labels = np.arange(first, min(first + 64, given.records))
            shape = (len(labels), 3, given.side, given.side)
            writer.append({"image": chance.integers(0, 256, shape, np.uint8), "label": labels})
    return index


def forget(paths: list[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Measurement:
    """One rank's part in measuring the readers for one size of batch."""

    def __init__(
        self, session: Session, given: argparse.Namespace, index: Path, batch: int
    ) -> None:
        self.session, self.given = session, given
        ctx = self.ctx = session.context
        self.cpu: dict[str, list[float]] = defaultdict(list)
        self.files = StripedFiles(index)
        self.paths = sorted(index.parent.glob("images-*.npy"))
        self.work = Work(given.compute)
        # --batch is a rank's.
        self.batches = Batches(
            len(self.files), batch * ctx.size, rank=ctx.rank, size=ctx.size, last="fill"
        )
        self.iterations = self.batches.iterations(0, N_WARM + given.batches)
        self.segment = ctx.segment(Prefetcher.nbytes(self.files, self.iterations))
        self.readers: dict[str, Reader] = {
            "memcpy": memcpy,
            "sequential read": partial(sequential, self.paths),
            "Prefetcher": partial(prefetcher, None),
            "Prefetcher, segment": partial(prefetcher, self.segment),
        }
        for n in given.workers:
            self.readers[f"DataLoader, {n} workers"] = partial(dataloader, n)
            self.readers[f"DataLoader by record, {n} workers"] = partial(by_record, n)

    def once(self, name: str, _: int) -> list[float]:
        """Return the microseconds of an iteration, of the slowest rank; note the CPU time."""
        if self.given.cold and self.ctx.rank == 0:
            forget(self.paths)
        self.ctx.barrier()
        cpu = cpu_seconds()
        source = self.readers[name](self.files, self.iterations)
        numbers = iter(self.iterations)
        for batch in islice(source, N_WARM):
            use(batch, next(numbers))
        del batch
        began = time.perf_counter()
        for batch in islice(source, self.given.batches):
            use(batch, next(numbers))
            self.work()
        mine = (time.perf_counter() - began) / self.given.batches
        del batch
        source.close()  # type: ignore[attr-defined]
        self.cpu[name].append((cpu_seconds() - cpu) / len(self.iterations))
        self.ctx.barrier()
        return self.slowest(mine)

    def compute(self, _: int) -> list[float]:
        """Return the microseconds of an iteration without input, of the slowest rank."""
        self.ctx.barrier()
        began = time.perf_counter()
        for _ in range(self.given.batches):
            self.work()
        return self.slowest((time.perf_counter() - began) / self.given.batches)

    def slowest(self, seconds: float) -> list[float]:
        """Return the largest of all ranks' figures, in microseconds."""
        return [1e6 * float(self.session.ranks.latest(np.array([seconds]))[0])]

    def rows(self) -> list[dict[str, Any]]:
        """Measure every reader in turn, round after round."""
        computing = Contender("compute", self.compute, calls=1)
        readers = [Contender(name, partial(self.once, name), calls=1) for name in self.readers]
        self.session.take_turns([computing, *readers] if self.given.compute else readers)
        base = computing.samples().median if self.given.compute else 0.0
        nbytes = self.batches.largest * self.files.dtype.itemsize
        took = {one.name: one.samples() for one in readers}
        ours = took["Prefetcher"].values
        return [
            {
                "reader": name,
                "batch": self.batches.largest,
                "ms": samples.median / 1e3,
                "least_ms": samples.least / 1e3,
                "most_ms": max(samples.values) / 1e3,
                "beyond_compute_ms": (samples.median - base) / 1e3,
                "cpu_ms": 1e3 * statistics.median(self.cpu[name]),
                "GB_per_s": nbytes / samples.median / 1e3,
                "to_prefetcher": statistics.median(
                    other / own for other, own in zip(samples.values, ours, strict=True)
                ),
            }
            for name, samples in took.items()
        ]


def use(batch: Batch, rows: np.ndarray) -> None:
    """Check that it is the batch of these records, and touch every page of it."""
    if "label" in batch and len(batch) == 2 and isinstance(batch["label"], torch.Tensor):
        assert np.array_equal(batch["label"].numpy(), rows), "another batch"
    np.asarray(batch["image"]).reshape(-1)[::4096].sum()


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the workers that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def numbers(text: str) -> list[int]:
    """Parse "0,1,2"."""
    return [int(word) for word in text.split(",")]


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Measure readers of mini-batches.")
    add = parser.add_argument
    add("--folder", type=Path, default=tempfile.gettempdir(), help="where the files are written")
    add("--records", type=int, default=4000)
    add("--side", type=int, default=224, help="pixels; an image has three channels of bytes")
    add("--files", type=int, default=4)
    add("--stripe", type=int, default=16, help="records in a row in one file")
    add("--batch", type=numbers, default=[16, 32, 64], help="records of a rank's batch")
    add("--workers", type=numbers, default=[0, 1, 2], help="of the DataLoader")
    add("--batches", type=int, default=60, help="of one measurement")
    add("--rounds", type=int, default=5)
    add("--compute", type=float, default=0.0, metavar="MS", help="between two batches")
    add("--cold", action="store_true", help="read from the disk, not from the page cache")
    add("--json", action="store_true", help="only one JSON document")
    return parser.parse_args()


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    lines = [
        f"{'batch':>5}  {'reader':<34} {'ms':>8} {'least':>8} {'most':>8} {'beyond':>8} "
        f"{'CPU ms':>7} {'GB/s':>6} {'to ours':>8}"
    ]
    for row in rows:
        lines.append(
            f"{row['batch']:5}  {row['reader']:<34} {row['ms']:8.2f} {row['least_ms']:8.2f} "
            f"{row['most_ms']:8.2f} {row['beyond_compute_ms']:8.2f} "
            f"{row['cpu_ms']:7.2f} {row['GB_per_s']:6.2f} "
            f"{row['to_prefetcher']:8.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Join the job, write the files, measure."""
    given = options()
    if given.records < given.files * max(given.batch):
        raise SystemExit("--records: at least one batch in every file")
    torch.set_num_threads(1)
    with pgasdl.init() as ctx, tempfile.TemporaryDirectory(dir=given.folder) as own:
        folder = Path(ctx.world.allgather("folder", own.encode())[0].decode())
        if ctx.rank == 0:
            written(folder, given)
        ctx.barrier(timeout=600)
        output = Output(ctx.rank, as_json=given.json)
        session = Session(ctx, output, rounds=given.rounds, pinned=False)
        session.header(f"input, torch {torch.__version__}")
        rows = [
            row
            for batch in given.batch
            for row in Measurement(session, given, folder / "images.json", batch).rows()
        ]
        session.say(
            f"figures    {'cold' if given.cold else 'warm'} files, {given.compute:g} ms of work; "
            f"medians of {given.rounds} rounds"
        )
        session.say(table(rows))
        output.write(
            {
                "ranks": ctx.size,
                "machine": session.machine,
                "torch": torch.__version__,
                "cold": given.cold,
                "compute_ms": given.compute,
                "rows": rows,
            }
        )


if __name__ == "__main__":
    main()
