"""What waits for a peer in PyTorch is told that it is lost, and how, and ends without harm."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jobs
import pytest
from tiers import full

pytest.importorskip("torch")

# What rank 0 is told, by what rank 1 does.
LOST = "PeerLostError: .*rank 1"
TOLD = {
    "killed": LOST,
    "raised": LOST,
    "left": LOST,
    "gone": LOST,
    "late": "Timed out waiting: .*rank 1",
    "aborted": "ClosedError: the process group was aborted",
    "wrong": "MismatchError: .*rank 1",
}
USERS = ("plain", "float16", "builtin", "state", "fsdp", "pipeline", "functional", "compiled")
# A state of the hook has calls of its own: those of the group, and its end, do not touch them.
OF_GROUPS = ("late", "aborted")


@pytest.mark.parametrize("user", full(USERS))
def test_a_peer_that_is_lost_is_named(user: str, tmp_path: Path) -> None:
    """Also where C++ waits for a future; and Python ends as it should afterwards."""
    ways = [how for how in TOLD if user != "state" or how not in OF_GROUPS]
    shown = jobs.run(0, jobs.PROGRAMS / "lost.py", user, str(tmp_path), *ways, timeout=280)
    ended = [json.loads(line) for line in shown.splitlines()]
    assert [how for how, _, _ in ended] == ways
    for how, code, told in ended:
        assert (code, bool(re.search(TOLD[how], told))) == (0, True), (how, code, told)
