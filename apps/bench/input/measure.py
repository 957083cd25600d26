"""Readers take turns: the time of their iterations, and the part of it that input takes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pgasdl.input import Iterations
from pgasdl.tools.bench.session import Session
from pgasdl.tools.bench.turns import Contender

N_WARM = 4  # batches before the clock runs: more than any reader has ready
Batch = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reader:
    """One row."""

    name: str  # for the table
    # Opens the data set, and yields batches: "image" and "label", the record's number.
    batches: Callable[[], Iterator[Batch]]
    ordered: bool = True  # the batches are those of the iterations, not of an order of its own


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


class Measurement:
    """One rank's part in measuring readers of the same data set, in batches of one size.

    ``batches`` of one measurement, with ``ms`` of work after each; ``cold``: files that leave the
    page cache before.
    """

    def __init__(
        self,
        session: Session,
        readers: Sequence[Reader],
        iterations: Iterations,
        *,
        batches: int,
        ms: float,
        cold: Sequence[Path] = (),
    ) -> None:
        self._session, self._readers, self._iterations = session, readers, iterations
        self._barrier = partial(session.context.barrier, timeout=600)
        self._batches, self._ms, self._cold = batches, ms, cold
        self._work = Work(ms) if ms else lambda: None
        self._noted: dict[str, list[np.ndarray]] = defaultdict(list)

    def rows(self) -> list[dict[str, Any]]:
        """Measure every reader in turn, round after round; ratios are to the first one's."""
        computing = Contender("compute", self._compute, calls=1)
        readers = [Contender(one.name, partial(self._once, one), calls=1) for one in self._readers]
        self._session.take_turns([computing, *readers] if self._ms else readers)
        base = computing.samples().median if self._ms else 0.0
        batches = self._iterations.batches
        ours = readers[0].samples().values
        rows = []
        for one in readers:
            samples = one.samples()
            first, wait, cpu = np.median(self._noted[one.name], axis=0)
            ratios = [mine / other for mine, other in zip(samples.values, ours, strict=True)]
            rows.append(
                {
                    "batch": batches.largest,
                    "reader": one.name,
                    "samples_per_s": 1e6 * batches.batch / samples.median,
                    "ms": samples.median / 1e3,
                    "least_ms": samples.least / 1e3,
                    "most_ms": max(samples.values) / 1e3,
                    "to_first": statistics.median(ratios),
                    "first_ms": 1e3 * first,
                    "wait_ms": 1e3 * wait,
                    "beyond_compute_ms": (samples.median - base) / 1e3,
                    "cpu_ms": 1e3 * cpu / batches.largest,
                }
            )
        return rows

    def _once(self, reader: Reader, _: int) -> list[float]:
        """Return the microseconds of the slowest rank's iteration; note the other figures."""
        if self._session.context.rank == 0:
            forget(self._cold)
        self._barrier()
        rows = iter(self._iterations)
        opened = time.perf_counter()
        source = reader.batches()
        first = self._iterate(reader, source, next(rows)) - opened
        for _ in range(N_WARM - 1):
            self._iterate(reader, source, next(rows))
        wait, cpu, began = 0.0, cpu_seconds(), time.perf_counter()
        for _ in range(self._batches):
            asked = time.perf_counter()
            wait += self._iterate(reader, source, next(rows)) - asked
        took = time.perf_counter() - began
        cpu = cpu_seconds() - cpu
        source.close()  # type: ignore[attr-defined]
        gc.collect()  # closes readers that are in a reference cycle
        self._barrier()
        took, first, wait = self._session.ranks.latest(np.array([took, first, wait]))
        self._noted[reader.name].append(np.array([first, *np.array([wait, cpu]) / self._batches]))
        return [1e6 * took / self._batches]

    def _iterate(self, reader: Reader, source: Iterator[Batch], rows: np.ndarray) -> float:
        """Use a batch, compute, and return when the batch was there."""
        batch = next(source)
        came = time.perf_counter()
        use(reader, batch, rows)
        del batch  # its buffer is free while this rank computes
        self._work()
        return came

    def _compute(self, _: int) -> list[float]:
        """Return the microseconds of an iteration without input, of the slowest rank."""
        self._barrier()
        began = time.perf_counter()
        for _ in range(self._batches):
            self._work()
        took = self._session.ranks.latest(np.array([time.perf_counter() - began]))
        return [1e6 * float(took[0]) / self._batches]


def use(reader: Reader, batch: Batch, rows: np.ndarray) -> None:
    """Check that it is the batch of these records, and touch every page of it."""
    if reader.ordered and not np.array_equal(np.asarray(batch["label"]), rows):
        raise SystemExit(f"{reader.name}: another batch than that of records {rows}: no figures")
    np.asarray(batch["image"]).reshape(-1)[::4096].sum()


def forget(paths: Sequence[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the workers that run now."""
    seconds = time.process_time()
    for worker in multiprocessing.active_children():
        stat = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Lay out a line for each row."""
    lines = [
        f"{'batch':>5}  {'reader':<32} {'samples/s':>9} {'ms':>8} {'least':>8} {'most':>8} "
        f"{'ratio':>6} {'first':>8} {'wait':>8} {'beyond':>8} {'CPU/sample':>10}"
    ]
    lines += [
        f"{row['batch']:5}  {row['reader']:<32} {row['samples_per_s']:9.0f} {row['ms']:8.2f} "
        f"{row['least_ms']:8.2f} {row['most_ms']:8.2f} {row['to_first']:6.2f} "
        f"{row['first_ms']:8.1f} {row['wait_ms']:8.2f} {row['beyond_compute_ms']:8.2f} "
        f"{row['cpu_ms']:10.3f}"
        for row in rows
    ]
    return "\n".join(lines)
