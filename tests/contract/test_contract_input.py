"""A data set in the memories of a job's ranks: its blocks, and what a loader makes of it."""

from __future__ import annotations

import io
import math
import random
import tarfile
import tempfile
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_harness import contract
from support.storage_server import StorageServer

from pgasdl.errors import DataError
from pgasdl.input import Batches, Loader, Records
from pgasdl.input.memory import JobMemory

BLOCK = 4096


def content(block: int) -> np.ndarray:
    return np.random.default_rng(block).integers(0, 256, BLOCK, np.uint8)


class Below:
    """The levels below: they count."""

    def __init__(self, broken: int = -1) -> None:
        self.loads: Counter[int] = Counter()
        self.broken = broken
        self._lock = threading.Lock()

    def load(self, block: int, out: memoryview) -> None:
        with self._lock:
            self.loads[block] += 1
        if block == self.broken:
            raise DataError("broken")
        out[:] = content(block).data


def memory(ctx: Any, n_blocks: int, n_slots: int, below: Below, **options: Any) -> JobMemory:
    given = {"next_use": lambda block: 0.0, "group": ctx.world, "timeout": 10.0, **options}
    return JobMemory(n_blocks, BLOCK, n_slots * BLOCK, load=below.load, **given)


def check(found: JobMemory, block: int, offset: int, nbytes: int) -> int | None:
    out = bytearray(nbytes)
    owner = found.read(block, offset, memoryview(out))
    if owner is not None:
        assert bytes(out) == content(block)[offset : offset + nbytes].tobytes(), (block, offset)
    return owner


@contract(ranks=(1, 2, 3))
def test_one_load_per_job(ctx: Any) -> None:
    """Each block is loaded by its home alone, once, whoever reads it and how often."""
    below, n = Below(), 20
    found = memory(ctx, n, -(-n // ctx.size), below)
    order = random.Random(ctx.rank).choices(range(n), k=60)
    found.want(order[:5])
    for block in [*order, *range(n)]:
        assert check(found, block, 17 * block, 300) == block % ctx.size
    assert dict(below.loads) == {block: 1 for block in range(ctx.rank, n, ctx.size)}
    ctx.barrier()
    found.close()
    found.close()


@contract(ranks=(1, 2, 3))
def test_blocks_that_are_given_up(ctx: Any) -> None:
    """With a slot for each rank nearly every read changes what others read; none sees a mixture."""
    below, n = Below(), 7
    found = memory(ctx, n, 1, below)
    chance = random.Random(ctx.rank)
    owners = [check(found, chance.randrange(n), 0, BLOCK) for _ in range(40)]
    assert any(owner is not None for owner in owners)
    ctx.barrier()
    found.close()


@contract(ranks=2)
def test_a_block_that_cannot_be_loaded(ctx: Any) -> None:
    """Nobody waits for it; the others are there."""
    below = Below(broken=4)
    found = memory(ctx, 6, 3, below)
    assert check(found, 4, 0, 10) is None
    owners = [check(found, block, 0, 10) for block in (3, 5, 0, 2)]
    assert owners == [1, 1, 0, 0], owners
    assert check(found, 4, 0, 10) is None
    ctx.barrier()
    found.close()


@contract(ranks=2)
def test_the_furthest_next_use_is_given_up(ctx: Any) -> None:
    below = Below()
    found = memory(ctx, 10, 3, below, next_use=lambda block: math.inf if block < 4 else -block)
    mine = range(ctx.rank, 10, 2)
    for block in mine:
        check(found, block, 0, 8)
    later = mine[-3:]  # those used soonest
    before = below.loads.total()
    for block in later:
        check(found, block, 0, 8)
    assert below.loads.total() == before
    found.want(mine[:2])  # not now, and later than all that are here
    for block in later:
        check(found, block, 0, 8)
    assert below.loads.total() == before
    ctx.barrier()
    found.close()


@contract(ranks=(2, 3))
def test_a_rank_that_closes_first(ctx: Any) -> None:
    """The others ask it, read what it had from there or below, and go on with one another."""
    n = 4 * ctx.size
    found = memory(ctx, n, 4, Below())
    for block in range(n):
        assert check(found, block, 0, 300) == block % ctx.size
    ctx.barrier()
    if ctx.rank == 0:
        found.close()
    ctx.barrier()
    if ctx.rank != 0:
        found.want(range(n))
        for _ in range(3):
            owners = [check(found, block, 0, 300) for block in range(n)]
            assert {owner for owner in owners if owner != 0} <= {None, *range(1, ctx.size)}
        assert owners[ctx.rank] == ctx.rank
        assert set(owners) >= set(range(1, ctx.size))
    found.close()
    ctx.barrier()


SAMPLES = 24


def pack(folder: Path) -> None:
    """Two tars of three blocks."""
    for file in range(2):
        with tarfile.open(folder / f"set-{file}.tar", "w") as tar:
            for number in range(file * SAMPLES // 2, (file + 1) * SAMPLES // 2):
                data = np.random.default_rng(number).bytes(400_000)
                info = tarfile.TarInfo(f"{number:04}.bin")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def decode(record: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    number = int(record["__key__"])
    assert record["bin"] == np.random.default_rng(number).bytes(400_000)
    return {"number": number, "drawn": random.integers(1 << 40)}


@contract(ranks=(1, 2, 4))
def test_storage_is_read_once_per_job(ctx: Any) -> None:
    """The ranks' parts are those of one process's batches, and one copy leaves the server."""
    pytest.importorskip("aiohttp")
    with ExitStack() as ends:
        url = server = b""
        if ctx.rank == 0:
            folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
            pack(folder)
            server = ends.enter_context(StorageServer(folder))
            url = f"{server.url}/set-{{0..1}}.tar".encode()
        url = ctx.world.allgather("url", url)[0].decode()
        with (
            Records(url, group=ctx.world) as records,
            Loader(records, 5, decode=decode, workers=2, seed=3, last="fill") as loader,
        ):
            found = [batch["number"].tolist() for _ in range(2) for batch in loader]
            state = loader.state_dict()
            ctx.barrier()
            read = ctx.world.combine(np.array([records.counters().storage]))[0]
        batches = Batches(SAMPLES, 5, rank=ctx.rank, size=ctx.size, seed=3, last="fill")
        assert found == [batches.rows(k).tolist() for k in range(2 * len(loader))]
        assert state["iteration"] == 2 * len(loader)
        assert read == records.files.nbytes
        if ctx.rank == 0:
            assert server.nbytes.total() == records.files.nbytes
