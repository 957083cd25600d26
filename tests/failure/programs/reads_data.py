"""Ranks that read a data set together, and go on when one is lost: ``reads_data.py FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from rank_tools import report, say

import pgasdl
from pgasdl import PeerLostError
from pgasdl.input import Records


def read_all(records: Records, folder: Path) -> None:
    for number in range(len(records)):
        record = records[number]
        assert record["bin"] == (folder / f"{record['__key__']}.bin").read_bytes()


def main(folder: Path) -> None:
    with (
        pgasdl.init() as ctx,
        Records(folder, format="folder", memory=8 << 20, group=ctx.world) as records,
    ):
        read_all(records, folder)
        say("working", read=records.counters().storage)
        try:
            while True:
                ctx.barrier()
                read_all(records, folder)
        except PeerLostError as error:
            report(ctx, error)
        read_all(records, folder)
        say("alone")
        group = ctx.survivors()
        group.barrier()
        before = records.counters().peers
        read_all(records, folder)
        say("together", peers=records.counters().peers - before)
        group.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
