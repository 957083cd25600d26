"""Arrays on a GPU over verbs, by way of the host; the GPU is the driver's double."""

from __future__ import annotations

import json
import shlex
import sys

import pytest
import rig
from support import cuda_double
from support.places import INSTALLED, TESTS

pytestmark = pytest.mark.full

PROGRAMS = TESTS / "gpu" / "programs"
PARTS = ["staged", "allreduces", "handles", "exchanges"]


def told(*program: object) -> str:
    """The output of two ranks in a guest."""
    ranks = [sys.executable, "-P", "-m", "pgasdl", "run", "-n", "2", "--no-prefix", *program]
    environ = cuda_double.variables() | {
        "PYTHONPATH": f"{INSTALLED}:{TESTS}",
        "PGASDL_TRANSPORT": "verbs",
        "PGASDL_GPU_PIECE": "768",
        "PGASDL_TIMEOUT": "120",
    }
    command = shlex.join(map(str, ranks))
    return rig.run(command, env=environ, timeout=300).check().output


def test_collectives() -> None:
    assert json.dumps(PARTS) in told(PROGRAMS / "collectives.py", "0", *PARTS)


def test_what_peers_do_not_reach() -> None:
    shown = told(PROGRAMS / "unreached.py", "job")
    (line,) = (line for line in shown.splitlines() if line.startswith("{"))
    said = json.loads(line)
    assert said.pop("beyond").startswith("SegmentError: ")
    assert all(words.startswith("UnavailableError: ") for words in said.values()), said
