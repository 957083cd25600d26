"""torchrun with an agent on each of two hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import digits, two_hosts
from support.launcher import agent_of_two

pytestmark = pytest.mark.full


def test_two_agents(tmp_path: Path) -> None:
    two_hosts.require()
    saved = tmp_path / "weights.npz"
    agent = agent_of_two("node1", digits.training(saved))
    script = f"""
        on node1 {agent} & first=$!
        on node2 {agent} & second=$!
        ended $first $second
    """
    told = two_hosts.succeeded(tmp_path, script)
    assert "the same bits on 2 ranks" in told
    digits.require_same(2, saved)


def test_rank_0_is_lost(tmp_path: Path) -> None:
    """It served the start-up; the others, of another agent, form a group."""
    two_hosts.require()
    program = two_hosts.PROGRAMS / "rank_0_is_killed.py"
    agent = "python3 -m torch.distributed.run --nnodes=2 --master-addr=node1 --master-port=29400"
    script = f"""
        on node1 {agent} --node-rank=0 --nproc-per-node=1 {program} && exit 1 &
        on node2 {agent} --node-rank=1 --nproc-per-node=2 {program} & second=$!
        wait "$second"
    """
    told = two_hosts.succeeded(tmp_path, script)
    assert sorted(told.splitlines()) == two_hosts.WITHOUT_RANK_0
