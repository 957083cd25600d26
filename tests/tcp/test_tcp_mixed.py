"""Four ranks on two hosts: shared memory inside each, tcp between them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support import digits, two_hosts
from support.places import TESTS

sys.path.append(str(TESTS / "random_programs"))
from generator import FEATURES

pytestmark = pytest.mark.full
START = two_hosts.ranks(4)
ROUTES = {
    0: "shm shm tcp tcp", 1: "shm shm tcp tcp", 2: "tcp tcp shm shm", 3: "tcp tcp shm shm",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _hosts() -> None:
    two_hosts.require()


@pytest.mark.parametrize("seeds", ["320 352", "352 384"])  # of worlds of four ranks
def test_random_programs(tmp_path: Path, seeds: str) -> None:
    """All collectives, exchanges and operations, to the bits of NumPy."""
    features = ",".join(feature for feature in FEATURES if feature != "leave")
    program = f"{TESTS}/random_programs/ways.py tcp {seeds} 60 {features} ''"
    told = two_hosts.succeeded(tmp_path, f"{START}\nall python3 {program}", apart=True)
    assert told.count("done") == 4


def test_training(tmp_path: Path) -> None:
    """In PyTorch, to the bits of one host that takes the same plan."""
    saved, plan = tmp_path / "weights.npz", "--plan=gdraa"
    script = f"{START}\nall {digits.trains(saved, plan)}"
    assert "the same bits on 4 ranks" in two_hosts.succeeded(tmp_path, script, apart=True)
    digits.require_same(4, saved, plan)


KILLED = """
import os, signal
import pgasdl

with pgasdl.init(timeout=60, log="error") as ctx:
    def say(what):
        os.write(1, f"rank {ctx.rank}{what}\\n".encode())  # at once

    say(": " + " ".join(map(ctx.transport_of, range(4))))
    ctx.barrier()
    try:
        if ctx.rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        ctx.barrier()
    except pgasdl.PeerLostError as error:
        say(f" lost {error.rank}")
        left = ctx.survivors()
        left.barrier()
"""


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_is_named_on_both_hosts(tmp_path: Path, victim: int) -> None:
    (tmp_path / "killed.py").write_text(KILLED.replace("VICTIM", str(victim)))
    script = f"""{START}
        all python3 killed.py >told || true
        cat told
    """
    told = two_hosts.succeeded(tmp_path, script, apart=True).splitlines()
    survivors = [rank for rank in range(4) if rank != victim]
    assert sorted(told) == sorted(
        [*(f"rank {rank}: {ROUTES[rank]}" for rank in range(4)),
         *(f"rank {rank} lost {victim}" for rank in survivors)]
    )  # fmt: skip
