"""Slurm and torchrun across two hosts with RDMA: the training app ends with the bits of shm."""

from __future__ import annotations

import os
from pathlib import Path

import hosts
import pytest
import rig
from support import digits, slurm
from support.environment import ONE_THREAD
from support.launcher import agent_of_two
from support.places import INSTALLED

pytestmark = pytest.mark.full

NODES = dict(zip(("guest1", "guest2"), hosts.ADDRESSES, strict=True))
SETTINGS = {"PGASDL_SECRET_FILE": "/run/secret", "PGASDL_STOPPED_AFTER": "15"}


def test_the_bits_of_shm(tmp_path: Path) -> None:
    """Both in one pair of guests: what a guest has imported once, it imports faster."""
    slurm.require()
    saved = {name: tmp_path / f"{name}.npz" for name in ("srun", "torchrun")}
    agent = agent_of_two("guest1", digits.training(saved["torchrun"]))
    script = f"""
        {slurm.start(NODES, list(NODES))}
        srun --nodes=2 --ntasks=2 {digits.trains(saved["srun"])}
        echo "torchrun:"
        on guest2 {agent} &
        {agent}
        wait $!
    """
    (tmp_path / "secret").write_bytes(os.urandom(32))
    (tmp_path / "script.sh").write_text(script)
    first, second = rig.run_pair(
        (f"bash {hosts.PROGRAMS}/pair.sh script.sh", f"{hosts.FAR} serve"),
        env={"PYTHONPATH": str(INSTALLED), "MAILBOX": str(tmp_path)} | ONE_THREAD | SETTINGS,
        directory=tmp_path,
        writable=[tmp_path],
        timeout=250,
    )
    assert first.status == 0, f"{first.output}\n--- guest 2\n{second.output}"
    for told in first.output.split("torchrun:\n"):
        assert "verbs to ranks [1]" in told and "the same bits on 2 ranks" in told, first.output
    for file in saved.values():
        digits.require_same(2, file)
