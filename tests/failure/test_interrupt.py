"""Ctrl-C ends every blocking call with KeyboardInterrupt."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
from failure_harness import Job, launched
from support.patience import took, until
from tiers import full

GOAL = "Ctrl-C to KeyboardInterrupt", 0.2
WHERE = ["notify_waitsome", "barrier", "world.allreduce", "allreduce", "handle", "passive_receive",
         "passive_send", "segment", "bind", "group", "survivors"]  # fmt: skip


@pytest.mark.parametrize("where", full(WHERE, quick=4))
def test_interrupt_ends_a_blocking_call(job: Callable[..., Job], where: str) -> None:
    ranks = job("interrupted.py", 2, where, PGASDL_TIMEOUT="200")
    ranks.event(0, "blocking")
    time.sleep(0.1)  # until it sleeps
    sent_at = ranks.signal(0, signal.SIGINT)
    took(GOAL[0], ranks.event(0, "interrupted")["at"] - sent_at, GOAL[1])
    assert ranks.ended([0]) == [-signal.SIGINT], ranks.transcript()
    assert "KeyboardInterrupt" in ranks.transcript()
    ranks.signal(1, signal.SIGUSR2)
    ranks.ended([1])


def test_interrupt_ends_init(job: Callable[..., Job]) -> None:
    ranks = job("interrupted.py", 2, "init", ranks=[0], PGASDL_TIMEOUT="200")
    ranks.event(0, "blocking")
    time.sleep(0.1)
    sent_at = ranks.signal(0, signal.SIGINT)
    took(GOAL[0], ranks.event(0, "interrupted")["at"] - sent_at, GOAL[1])
    assert ranks.ended([0]) == [-signal.SIGINT]


def test_interrupt_of_the_launcher_ends_all_ranks() -> None:
    program = (
        "import pgasdl\n"
        "with pgasdl.init() as ctx:\n"
        "    segment = ctx.segment(64)\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        ctx.notify_waitsome(segment)\n"
        "    except KeyboardInterrupt: print('interrupted', flush=True)\n"
    )
    with launched("-n", "2", "-c", program) as process:
        assert process.stdout is not None
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
        process.send_signal(signal.SIGINT)
        assert until(lambda: process.poll() is not None)
        said = process.stdout.read()
        assert process.returncode == 0, said
        assert "[0] interrupted" in said and "[1] interrupted" in said
