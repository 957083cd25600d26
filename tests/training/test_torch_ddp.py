"""``pgasdl.torch.ddp_hook`` under DistributedDataParallel."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import pytest
from support.ranks import on_ranks
from tiers import full

torch = pytest.importorskip("torch")

import pgasdl  # noqa: E402
from pgasdl import loopback  # noqa: E402
from pgasdl.torch import DDPState  # noqa: E402


@pytest.mark.parametrize("size", full([2, 3], quick=1))
def test_it_trains_what_ddp_trains(forked: Callable[..., str], size: int, tmp_path: Path) -> None:
    """Whatever DDP does with its buckets, and where ranks have unequal numbers of batches."""
    shown = forked(size, jobs.PROGRAMS / "ddp.py", tmp_path / "store")
    assert sorted(line.split("rank ")[1] for line in shown.splitlines()) == [
        f"{rank} is right" for rank in range(size)
    ]


def test_hooks_that_users_write_train_as_over_gloo(forked: Callable[..., str]) -> None:
    """With callbacks that wait for other buckets; and what ends in an error does so everywhere."""
    shown = forked(2, jobs.PROGRAMS / "ddp_hooks.py", torchrun=True)
    assert (shown.count("is right"), shown.count("is refused")) == (11, 3)


def test_a_callback_waits_for_the_buckets_behind() -> None:
    def program(ctx: Any) -> list[float]:
        state = DDPState(ctx, timeout=20)
        buckets = [torch.full((3,), float(ctx.rank + size)) for size in range(5)]
        held, here = threading.Event(), threading.current_thread()

        def hold(_: Any) -> bool:  # if the bucket is over by now, the callback runs here
            return threading.current_thread() is here or held.wait(30)

        began = state.average(torch.ones(1)).then(hold)
        futures = [state.average(bucket) for bucket in buckets]

        def behind(done: Any, rest: list[Any]) -> Any:
            torch.futures.wait_all(rest)
            return done.value()

        waiting = [
            future.then(functools.partial(behind, rest=futures[number + 1 :]))
            for number, future in enumerate(futures)
        ]
        held.set()
        assert began.wait()
        means = [float(each.wait()[0]) for each in waiting]
        state.close()
        return means

    assert loopback.run(2, program) == [[0.5, 1.5, 2.5, 3.5, 4.5]] * 2


def test_buckets_are_averaged_in_their_order() -> None:
    def program(ctx: Any) -> list[float]:
        held = ctx.footprint()
        state = DDPState(ctx, timeout=20)
        buckets = [torch.full((size,), float(ctx.rank + size)) for size in (1, 5, 100_000, 3)]
        futures = [state.average(bucket) for bucket in buckets]
        for future, bucket in zip(futures, buckets, strict=True):
            assert future.wait() is not None and (bucket == bucket[0]).all()
        state.close()
        assert ctx.footprint() == held
        with pytest.raises(pgasdl.ClosedError, match="DDPState was closed"):
            state.average(buckets[0])
        return [float(bucket[0]) for bucket in buckets]

    assert loopback.run(2, program) == [[1.5, 5.5, 100_000.5, 3.5]] * 2
    assert "pgasdl-ddp" not in {thread.name for thread in threading.enumerate()}


@on_ranks(2)
def test_an_error_reaches_backward_and_stays(ctx: Any) -> None:
    state = DDPState(ctx, timeout=20)
    for bucket in (torch.ones(2, dtype=torch.complex64), torch.ones(2)):
        future = state.average(bucket)
        for waits in (future, torch.futures.collect_all([future])):  # Python's way, and C++'s
            with pytest.raises(RuntimeError, match=r"BufferRefusedError: .*complex64"):
                waits.wait()
    state.close()


@on_ranks(1)
def test_a_state_that_nobody_holds_ends_its_thread(ctx: Any) -> None:
    state = DDPState(ctx)
    state.average(torch.ones(2)).wait()
    (thread,) = state._queue._threads
    del state
    thread.join(30)
    assert not thread.is_alive()


ENDS = """
import time, torch, pgasdl
from pgasdl.torch import DDPState

with pgasdl.init() as ctx:
    state = DDPState(ctx)
    ctx.barrier()
    time.sleep(ctx.rank)  # rank 0's callback is there before its bucket is averaged
    future = state.average(torch.ones(5))
    future.add_done_callback(lambda done: [time.sleep(1e-4) for _ in range(5000)])
    future.wait()
print(f"rank {ctx.rank} ends")
"""


@pytest.mark.full
def test_python_ends_while_the_thread_is_in_pytorch(tmp_path: Path) -> None:
    program = tmp_path / "ends.py"
    program.write_text(ENDS)
    assert jobs.run(2, program).count("ends") == 2
