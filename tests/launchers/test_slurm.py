"""A real Slurm of two nodes: its controller and daemons are started by each test."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support import digits, slurm, two_hosts

pytestmark = pytest.mark.full

# Both nodes have one /run, and so one munged.
START = slurm.start({"node1": "198.18.0.1", "node2": "198.18.0.2"}, ["node1"])
RANK = """
import os, pgasdl
with pgasdl.init(log="warning") as ctx:
    at = ctx.launch
    print(at.kind, ctx.rank, os.environ["SLURMD_NODENAME"], at.local_rank, at.local_size, at.master)
"""


@pytest.fixture(autouse=True)
def hosts_and_slurm() -> None:
    two_hosts.require()
    slurm.require()


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_training(n_ranks: int, tmp_path: Path) -> None:
    saved = tmp_path / "weights.npz"
    srun = f"srun --nodes=2 --ntasks={n_ranks} --ntasks-per-node={n_ranks // 2}"
    told = two_hosts.succeeded(tmp_path, f"{START}\n{srun} {digits.trains(saved)}")
    assert f"the same bits on {n_ranks} ranks" in told
    digits.require_same(n_ranks, saved)


def test_places(tmp_path: Path) -> None:
    """Nodes of different numbers of ranks; rank 0's address comes from the list of nodes."""
    (tmp_path / "rank.py").write_text(RANK)
    srun = f"srun --nodes=2 --ntasks=3 --distribution=cyclic {sys.executable} {tmp_path}/rank.py"
    told = two_hosts.succeeded(tmp_path, f"{START}\n{srun}")
    assert sorted(told.splitlines()) == [
        "slurm 0 node1 0 2 node1", "slurm 1 node2 0 1 node1", "slurm 2 node1 1 2 node1",
    ]  # fmt: skip


def test_a_killed_task(tmp_path: Path) -> None:
    """The error names the rank, srun fails, and no rank stays."""
    program = two_hosts.PROGRAMS / "one_is_killed.py"
    script = f"""
        {START}
        status=0
        srun --label --nodes=2 --ntasks=2 python3 {program} || status=$?
        echo "status $status, left: $(pgrep --full --count {program.name} || true)"
        echo "steps: $(squeue --steps --noheader)"
    """
    done = two_hosts.run(tmp_path, script)
    told = f"{done.stdout}{done.stderr}"
    assert re.search(r"^0: .*PeerLostError: .*rank 1\b", done.stderr, re.MULTILINE), told
    assert re.search(r"node2: task 1: Killed", done.stderr), told
    assert re.search(r"^status [1-9]\d*, left: 0$", done.stdout, re.MULTILINE), told
    assert "steps: \n" in done.stdout, told


def test_rank_0_is_lost(tmp_path: Path) -> None:
    """It served the start-up; the others, whom srun leaves alone, form a group."""
    program = two_hosts.PROGRAMS / "rank_0_is_killed.py"
    srun = "srun --kill-on-bad-exit=0 --nodes=2 --ntasks=3"
    done = two_hosts.run(tmp_path, f"{START}\n{srun} python3 {program}")
    told = f"{done.stdout}{done.stderr}"
    ranks = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert ranks == two_hosts.WITHOUT_RANK_0, told
    assert "task 0: Killed" in done.stderr, told
