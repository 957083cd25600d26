"""Ctrl-C at the launcher reaches all ranks. Every blocking call by itself: tests/contract."""

from __future__ import annotations

import signal

from failure_harness import launched
from support.patience import until


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
