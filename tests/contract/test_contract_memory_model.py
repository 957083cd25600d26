"""The table of ``.github/docs/memory_model.rst``, row by row.

A row that holds is a test on every transport. A row in which nothing is ordered is a
counterexample: a program that the adversary of ``loopback`` gives an outcome that surprises.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from contract_harness import ORDERING, contract
from support.places import ROOT

from pgasdl import loopback

PAGE = ROOT / ".github/docs/memory_model.rst"

# Rows that other modules of this folder show.
ELSEWHERE = {
    "write, then flag; same peer, same queue": [
        "notifications.test_notify_covers_writes_to_other_segments",
        "notifications.test_small_writes_then_notify",
    ],
    "flag, then flag; same id": [
        "notifications.test_second_notify_overwrites",
        "counts.test_no_addition_is_lost",
    ],
    "read, then local load": ["transfers.test_read_all_sizes", "transfers.test_read_notify"],
    "seen flag, then local load": [
        "notifications.test_data_is_there_when_reset_hands_out_the_value",
        "counts.test_data_of_every_addition_are_there",
    ],
    "atomic, then atomic; same word": ["atomics.test_old_values_are_distinct"],
    "barrier, then anything": ["transfers.test_read_all_sizes"],
}


def take(ctx: Any, segment: Any, flag: int) -> int:
    """Wait for a flag, and take it."""
    ctx.notify_waitsome(segment, flag, 1)
    return int(ctx.notify_reset(segment, flag))


def seen(outcome: int, program: Callable[[Any, Any, threading.Event], int | None]) -> bool:
    """Whether a rank returns this outcome under one of 100 seeds of the adversary.

    Its ranks are threads, so an event lets a rank wait without moving what is under way.
    """

    def on_rank(ctx: Any, looked: threading.Event) -> int | None:
        segment = ctx.segment(24)
        result = None
        try:
            result = program(ctx, segment, looked)
        finally:
            if result is not None:
                looked.set()
        ctx.wait()
        ctx.barrier()
        return result

    faults = {"delay": 100, "reorder": True, "late_source": True, "timeout": 60, "log": "warning"}
    for seed in range(1, 101):
        looked = threading.Event()
        if outcome in loopback.run(2, partial(on_rank, looked=looked), seed=seed, **faults):
            return True
    return False


def test_write_then_write() -> None:
    """write, then write"""

    def program(ctx: Any, segment: Any, looked: threading.Event) -> int | None:
        numbers = segment.numpy(np.int64)
        numbers[:2] = 1, 2
        if ctx.rank == 0:
            ctx.write(segment[0:8], 1, segment[16:24])
            ctx.write(segment[8:16], 1, segment[16:24])
            ctx.notify(1, segment, 0)
            return None
        take(ctx, segment, 0)
        return int(numbers[2])

    assert seen(1, program)  # 1: the later write has come first


def test_write_then_flag_of_another_queue() -> None:
    """write, then flag; different queues or peers"""

    def program(ctx: Any, segment: Any, looked: threading.Event) -> int | None:
        queue = ctx.queue_create()
        numbers = segment.numpy(np.int64)
        numbers[0] = 1
        if ctx.rank == 0:
            ctx.write(segment[0:8], 1, segment[8:16])
            ctx.notify(1, segment, 0, queue=queue)
            looked.wait(60)
            ctx.wait(queue)
            return None
        take(ctx, segment, 0)
        return int(numbers[1])

    assert seen(0, program)


def test_write_then_flag_at_another_peer() -> None:
    """write, then flag; different queues or peers"""

    def program(ctx: Any, segment: Any, looked: threading.Event) -> int | None:
        segment.numpy(np.int64)[0] = 1
        if ctx.rank == 1:
            looked.wait(60)
            return None
        ctx.write(segment[0:8], 1, segment[8:16])
        ctx.notify(0, segment, 0)
        take(ctx, segment, 0)
        return int(segment.numpy(np.int64, peer=1)[1])

    assert seen(0, program)


def test_write_then_read() -> None:
    """write, then read of the same bytes"""

    def program(ctx: Any, segment: Any, looked: threading.Event) -> int | None:
        numbers = segment.numpy(np.int64)
        numbers[0] = 1
        ctx.barrier()
        if ctx.rank == 1:
            return None
        ctx.write_notify(segment[0:8], 1, segment[8:16], 0)
        ctx.read(segment[16:24], 1, segment[8:16])
        ctx.wait()
        return int(numbers[2])

    assert seen(0, program)  # 0: the read has overtaken write and flag


@contract(ranks=2, on=ORDERING)
def test_local_store_then_an_operation(ctx: Any) -> None:
    """local store, then write, notify or atomic"""
    segment = ctx.segment(40)
    copied, mine, word = segment[0:8], segment[8:16], segment[32:40]
    numbers = segment.numpy(np.int64)
    peer = 1 - ctx.rank
    for turn in range(1, 11):
        numbers[1] = 10 * turn
        ctx.write_notify(mine, peer, segment[16:24], 0)  # a write carries the number
        take(ctx, segment, 0)
        assert numbers[2] == 10 * turn
        ctx.wait()
        ctx.barrier()
        numbers[1] = 10 * turn + 1
        ctx.notify(peer, segment, 1)  # who sees the flag reads it
        take(ctx, segment, 1)
        ctx.read(copied, peer, mine)
        ctx.wait()
        assert numbers[0] == 10 * turn + 1
        ctx.barrier()
        numbers[1] = 10 * turn + 2
        ctx.atomic_fetch_add(word, peer, 1)  # who sees the atomic's value reads it
        while ctx.atomic_fetch_add(word, ctx.rank, 0) < turn:
            pass
        ctx.read(copied, peer, mine)
        ctx.wait()
        assert numbers[0] == 10 * turn + 2
        ctx.barrier()


def test_local_store_after_write() -> None:
    """local store after write, before wait"""

    def program(ctx: Any, segment: Any, looked: threading.Event) -> int | None:
        numbers = segment.numpy(np.int64)
        numbers[0] = 1
        if ctx.rank == 0:
            ctx.write_notify(segment[0:8], 1, segment[8:16], 0)
            numbers[0] = 2
            return None
        take(ctx, segment, 0)
        return int(numbers[1])

    assert seen(2, program)


def test_atomic_and_write_of_one_word() -> None:
    """atomic, then plain load or write of the same word"""

    def program(ctx: Any, segment: Any, looked: threading.Event) -> int | None:
        numbers = segment.numpy(np.int64)
        numbers[0] = 5
        ctx.barrier()
        if ctx.rank == 0:
            ctx.write(segment[0:8], 1, segment[8:16])
            ctx.atomic_fetch_add(segment[8:16], 1, 1)
            ctx.notify(1, segment, 0)
            return None
        take(ctx, segment, 0)
        return int(numbers[1])

    assert seen(5, program)  # the addition is lost


def test_write_then_barrier() -> None:
    """write, then barrier"""

    def program(ctx: Any, segment: Any, looked: threading.Event) -> int | None:
        numbers = segment.numpy(np.int64)
        numbers[0] = 1
        ctx.barrier()
        if ctx.rank == 0:
            ctx.write(segment[0:8], 1, segment[8:16])
        ctx.barrier()
        if ctx.rank == 0:
            looked.wait(60)
            return None
        return int(numbers[1])

    assert seen(0, program)


def test_each_row_of_the_table_has_a_test() -> None:
    """No row without a test, and no test of a row that is gone; all named tests exist."""
    text = PAGE.read_text()
    table = text[text.index(".. list-table::") :]
    rows = {row.replace("``", "") for row in re.findall(r"^   \* - (.+)$", table, re.M)} - {"Pair"}
    here = {test.__doc__ for name, test in globals().items() if name.startswith("test_")}
    here.discard(test_each_row_of_the_table_has_a_test.__doc__)
    assert rows == here | ELSEWHERE.keys()
    assert not here & ELSEWHERE.keys()
    for path in chain.from_iterable(ELSEWHERE.values()):
        module, name = path.split(".")
        assert getattr(importlib.import_module(f"test_contract_{module}"), name).program
