"""Measure readers of mini-batches, in turns: ours, PyTorch's DataLoader, webdataset.

    python apps/input_bench.py records --batch 16,32,64
    pgasdl run -n 2 apps/input_bench.py records --files 1,2,4,8 --cold --compute 20
    python apps/input_bench.py pictures --workers 0,1,2 --compute 100

``records`` are of one size, in NumPy's files, each in a folder of its own: the prefetcher and the
DataLoader, beside a copy of a batch between warm buffers and a sequential read of as many bytes,
than which no reader can be faster. ``pictures`` are JPEGs in tars that Pillow decodes and scales:
the Loader with threads or processes, the DataLoader over the same files in a folder, webdataset,
and a plain loop. ``pictures`` also says how much the ranks read from storage together.

Every reader gives each rank its part of the same global batches (webdataset: of its own). Rounds
are interleaved; a row has the medians, in milliseconds, of the slowest rank: an iteration (least,
most, and its ratio to the first row's), the time from opening the data set to the first batch, how
long a rank waits for a batch, and what an iteration takes beyond the computing alone. CPU time is
that of all processes of rank 0, without their start. Between two batches a rank computes for
``--compute`` milliseconds, always the same number of matrix products. ``--cold``: the files are
dropped from the page cache before every measurement.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench.input.measure import N_WARM, Measurement, Reader, table

import pgasdl
from pgasdl.input import Batches, Iterations
from pgasdl.tools.bench.output import Output
from pgasdl.tools.bench.session import Session


def numbers(text: str) -> list[int]:
    """Parse "0,1,2"."""
    return [int(word) for word in text.split(",")]


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and refuse what cannot be measured."""
    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("--folder", type=Path, default=tempfile.gettempdir(), help="where the files are written")
    add("--workers", type=numbers, default=[0, 1, 2], help="of readers that have workers")
    add("--rounds", type=int, default=5)
    add("--compute", type=float, default=0.0, metavar="MS", help="between two batches")
    add("--cold", action="store_true", help="read from the disk, not from the page cache")
    add("--json", action="store_true", help="only one JSON document")
    parser = argparse.ArgumentParser(description="Measure readers of mini-batches.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    add = kinds.add_parser("records", parents=[common]).add_argument
    add("--records", type=int, default=4000)
    add("--side", type=int, default=224, help="pixels; an image has three channels of bytes")
    add("--files", type=numbers, default=[4], help="and folders")
    add("--batch", type=numbers, default=[16, 32, 64], help="records of a rank's batch")
    add("--batches", type=int, default=60, help="of one measurement")
    add = kinds.add_parser("pictures", parents=[common]).add_argument
    add("--records", type=int, default=512)
    add("--tars", type=int, default=8)
    add("--batch", type=numbers, default=[32], help="pictures of a rank's batch")
    add("--batches", type=int, default=12, help="of one measurement")
    given = parser.parse_args(arguments)
    if given.kind == "records" and given.records < max(given.files) * max(given.batch):
        parser.error("--records: at least one batch in every file")
    return given


class Bench:
    """One run, on this rank. Every member is collective."""

    def __init__(self, ctx: pgasdl.Context, given: argparse.Namespace, folder: Path) -> None:
        self.ctx, self.given, self.folder = ctx, given, folder
        output = Output(ctx.rank, as_json=given.json)
        self.session = Session(ctx, output, rounds=given.rounds, pinned=False)
        self.output, self.say = output, output.say

    def run(self) -> None:
        """Measure everything, and report."""
        given = self.given
        self.session.header(f"input, {given.kind}, torch {torch.__version__}")
        self.say(
            f"figures    {'cold' if given.cold else 'warm'} files, {given.compute:g} ms of work; "
            f"medians of {given.rounds} rounds"
        )
        self.output.write(
            {
                "ranks": self.ctx.size,
                "machine": self.session.machine,
                "torch": torch.__version__,
                "cold": given.cold,
                "compute_ms": given.compute,
                **(self.records() if given.kind == "records" else self.pictures()),
            }
        )

    def records(self) -> dict[str, Any]:
        """Measure readers of records of one size, for each number of files."""
        from bench.input import fixed

        given, rows = self.given, []
        for files in given.files:
            paths = fixed.paths(self.folder, files)
            if self.ctx.rank == 0:
                fixed.write(paths, records=given.records, side=given.side)
            self.ctx.barrier(timeout=600)
            found = self.measured(partial(fixed.readers, self.ctx, paths), paths)
            self.say(f"files      {files}, each in a folder of its own\n{table(found)}")
            rows += [{"files": files, **row} for row in found]
        return {"rows": rows}

    def pictures(self) -> dict[str, Any]:
        """Measure readers of pictures, and how much is read from storage."""
        from bench.input import decoders, pictures

        given = self.given
        if self.ctx.rank == 0:
            pictures.written(self.folder, given.records, given.tars)
        self.ctx.barrier(timeout=600)
        tars = sorted(self.folder.glob("*.tar"))
        storage = decoders.copies(self.ctx, tars, given.batch[0])
        size = storage["bytes"] / given.records / 1e3
        self.say(f"pictures   {given.records} of {size:.0f} kB in {given.tars} tars")
        self.say(
            f"storage    {storage['epochs']} epochs read {storage['memory']:.2f} times the data "
            f"set, without the ranks' memory {storage['none']:.2f} times"
        )
        readers = partial(decoders.readers, self.ctx, tars)
        rows = self.measured(readers, [*tars, *(self.folder / "jpegs").iterdir()])
        self.say(table(rows))
        return {"storage": storage, "rows": rows}

    def measured(
        self, readers: Callable[[Iterations, list[int]], list[Reader]], paths: list[Path]
    ) -> list[dict[str, Any]]:
        """Return the rows of each size of batch."""
        given, ctx, rows = self.given, self.ctx, []
        for batch in given.batch:  # a rank's
            iterations = Batches(
                given.records, batch * ctx.size, rank=ctx.rank, size=ctx.size, last="fill"
            ).iterations(0, N_WARM + given.batches)
            rows += Measurement(
                self.session,
                readers(iterations, given.workers),
                iterations,
                batches=given.batches,
                ms=given.compute,
                cold=paths if given.cold else (),
            ).rows()
        return rows


def main() -> None:
    """Join the job, and measure."""
    given = options()
    torch.set_num_threads(1)
    with pgasdl.init() as ctx, tempfile.TemporaryDirectory(dir=given.folder) as own:
        folder = Path(ctx.world.allgather("folder", own.encode())[0].decode())
        Bench(ctx, given, folder).run()
        ctx.barrier(timeout=600)  # nobody needs the folder of rank 0 any more


if __name__ == "__main__":
    main()
