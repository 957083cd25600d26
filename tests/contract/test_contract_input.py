"""Blocks of a data set in the memories of a job's ranks."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from typing import Any

import numpy as np
from contract_harness import contract

from pgasdl.errors import DataError
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
