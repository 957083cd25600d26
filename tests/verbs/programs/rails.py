"""Over two rails: ``rails.py exact``, ``rails.py lose`` or ``rails.py train ARGUMENTS...``.

``exact`` does what exact.py does, and asks the devices afterwards. ``lose`` takes the first rail's
link away and looks at what is told, and at what goes on. ``train`` runs the training app, and takes
the second rail's link away once that device has carried a good part of the training.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from support.places import APPS

import pgasdl
from pgasdl import Context

HERE = Path(__file__).parent
DEVICES = ("rxe0", "rxe1")
LINKS = ("inner0", "inner1")
MANY = 600  # packets that a device sends in a part of a training, and not to connect


def packets(device: str) -> int:
    """The packets that the device has sent so far, for all ranks of this guest."""
    return int(Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts").read_text())


def set_link(rail: int, state: str) -> None:
    subprocess.run(["ip", "link", "set", LINKS[rail], state], check=True)


def exact() -> None:
    before = [packets(device) for device in DEVICES]
    runpy.run_path(str(HERE / "exact.py"))["main"]("01", "verbs")
    sent = [packets(device) - n for device, n in zip(DEVICES, before, strict=True)]
    assert min(sent) > MANY, sent
    print(f"sent {sent}")


def exchange(ctx: Context, segment: pgasdl.Segment, turn: int) -> None:
    """A long message each way, and its bits."""
    n = segment.nbytes // 2
    peer = 1 - ctx.rank
    view = segment.numpy(np.uint8)
    view[:n] = np.random.default_rng((turn, ctx.rank)).integers(0, 256, n, np.uint8)
    ctx.write_notify(segment[0:n], peer, segment[n : 2 * n], 0, turn)
    assert ctx.notify_waitsome(segment, 0, 1) == 0
    assert ctx.notify_reset(segment, 0) == turn
    wanted = np.random.default_rng((turn, peer)).integers(0, 256, n, np.uint8)
    assert (view[n:] == wanted).all(), turn
    ctx.wait()
    ctx.barrier()


def until(ctx: Context, dropped: bool) -> None:
    """Wait until this rank knows that a rail was dropped, or carries again."""
    deadline = time.monotonic() + 15
    while ("was dropped" in ctx.describe()) != dropped:
        assert time.monotonic() < deadline, ctx.describe()
        time.sleep(0.05)


def lose() -> None:
    with pgasdl.init() as ctx:
        segment = ctx.segment(1 << 20)
        peer = 1 - ctx.rank
        for turn in range(1, 4):
            exchange(ctx, segment, turn)
        ctx.atomic_fetch_add(segment[0:8], peer, 1)
        ctx.barrier()
        if ctx.rank == 0:
            set_link(0, "down")
        for turn in range(4, 10):
            exchange(ctx, segment, turn)
        until(ctx, dropped=True)
        (line,) = (line for line in ctx.describe().splitlines() if line.startswith("RDMA by "))
        assert f"rxe0:1 to rank {peer} was dropped: " in line, line
        try:
            ctx.atomic_fetch_add(segment[0:8], peer, 1)
        except pgasdl.UnavailableError as error:
            assert "first rail only" in str(error)
        else:
            raise AssertionError("an atomic went by the second rail")
        if ctx.rank == 0:
            told = subprocess.run(
                [sys.executable, "-P", "-m", "pgasdl", "topo"],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            )  # fmt: skip
            assert told.returncode == 0, told.stdout
            assert "1 of 2 (rxe1:1)" in told.stdout and "the port is " in told.stdout, told.stdout
        ctx.barrier()
        if ctx.rank == 0:
            set_link(0, "up")
            ctx.reconnect(peer)
            ctx.notify(peer, segment, 1)
        else:
            assert ctx.notify_waitsome(segment, 1, 1) == 1
        until(ctx, dropped=False)
        for turn in range(10, 13):
            exchange(ctx, segment, turn)
        ctx.atomic_fetch_add(segment[0:8], peer, 1)
        ctx.barrier()
    print("complete")


def train(*arguments: str) -> None:
    """Rank 0 harms, and says how much of the training each device carried until then."""
    sys.argv = [str(APPS / "train_digits.py"), *arguments]
    sys.path.insert(0, str(APPS))
    over = threading.Event()
    harmed: list[list[int]] = []

    def harm() -> None:
        before = [packets(device) for device in DEVICES]
        while packets(DEVICES[1]) - before[1] < MANY:
            if over.wait(0.005):
                return
        harmed.append([packets(device) for device in DEVICES])
        set_link(1, "down")

    first = os.environ["PGASDL_RANK"] == "0"
    thread = threading.Thread(target=harm)
    if first:
        thread.start()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        over.set()
        if first:
            thread.join()
    if first:
        assert harmed, "the training was over before its second device had carried a part of it"
        more = packets(DEVICES[0]) - harmed[0][0]
        assert more > MANY, f"the training was over when the link went down: {more} packets more"
        set_link(1, "up")
        print("trained on without rxe1")


if __name__ == "__main__":
    {"exact": exact, "lose": lose, "train": train}[sys.argv[1]](*sys.argv[2:])
