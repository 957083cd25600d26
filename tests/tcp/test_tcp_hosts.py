"""Two hosts that only a cable joins: network namespaces of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import digits, two_hosts
from support.launcher import agent_of_two
from support.places import ROOT

HELLO = ROOT / "apps/hello_notify.py"
START = """
    rank() {
      local number=$1; shift
      on "node$((number + 1))" env PGASDL_RANK=$number PGASDL_SIZE=2 PGASDL_JOB_ID=apart \\
        PGASDL_STORE=node1:29500 "$@"
    }
"""


@pytest.fixture(autouse=True)
def _hosts() -> None:
    two_hosts.require()


def test_the_first_program(tmp_path: Path) -> None:
    """Nothing is set but where the ranks meet: they find that tcp is what joins them."""
    script = f"""{START}
        rank 0 python3 {HELLO} 2>&1 & first=$!
        rank 1 python3 {HELLO} 2>&1 & second=$!
        ended $first $second
    """
    told = two_hosts.succeeded(tmp_path, script, apart=True)
    assert "rank 0 of 2 got 1" in told and "rank 1 of 2 got 0" in told
    assert "tcp to rank" in told, told


LOSES = """
import sys, time
import pgasdl

with pgasdl.init(stopped_after=2.0, heartbeat_ms=200, timeout=60, log="error") as ctx:
    segment = ctx.segment(64)
    ctx.barrier()
    time.sleep(1)
    print("ready", flush=True)
    began = time.monotonic()
    try:
        ctx.notify_waitsome(segment)
    except pgasdl.PeerLost as error:
        waited = time.monotonic() - began
        print(f"rank {ctx.rank} lost {error.rank}: {'in time' if waited < 15 else waited}")
"""


def test_a_pulled_cable(tmp_path: Path) -> None:
    """Each side names the other by the deadline: no packet says that anything is wrong."""
    (tmp_path / "loses.py").write_text(LOSES)
    script = f"""{START}
        rank 0 python3 loses.py >first 2>&1 & first=$!
        rank 1 python3 loses.py >second 2>&1 & second=$!
        until grep -q ready first && grep -q ready second; do sleep 0.1; done
        cable down
        wait $first $second || true
        cat first second
    """
    told = two_hosts.succeeded(tmp_path, script, apart=True)
    assert "rank 0 lost 1: in time" in told and "rank 1 lost 0: in time" in told, told


@pytest.mark.full
def test_two_agents_of_torchrun(tmp_path: Path) -> None:
    """Trained over tcp, to the bits of shared memory."""
    saved = tmp_path / "weights.npz"
    agent = agent_of_two("node1", digits.training(saved))
    script = f"""
        on node1 {agent} & first=$!
        on node2 {agent} & second=$!
        ended $first $second
    """
    told = two_hosts.succeeded(tmp_path, script, apart=True)
    assert "the same bits on 2 ranks" in told
    digits.require_same(2, saved)
