"""Arrays on a GPU over verbs, by way of the host and by the adapter; the GPU is a double."""

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
PARTS = ["allreduces", "handles", "exchanges"]


def told(*program: object, size: int = 2, adapter: bool = False, **double: object) -> str:
    """The output of ranks in a guest, whose adapter may reach the GPU's memory."""
    ranks = [sys.executable, "-P", "-m", "pgasdl", "run", "-n", size, "--no-prefix", *program]
    environ = cuda_double.variables(adapter=adapter, **double) | {
        "PYTHONPATH": f"{INSTALLED}:{TESTS}",
        "PGASDL_TRANSPORT": "verbs",
        "PGASDL_GPU_PIECE": "768",
        "PGASDL_TIMEOUT": "120",
    }
    command = shlex.join(map(str, ranks))
    memory = 6 << 30 if adapter else 2 << 30  # what is registered is there, page by page
    return rig.run(command, env=environ, memory=memory, timeout=300).check().output


def test_collectives_by_the_host() -> None:
    parts = ["staged", *PARTS]
    assert json.dumps(parts) in told(PROGRAMS / "collectives.py", "0", *parts)


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_by_the_adapter(size: int) -> None:
    parts = [*PARTS, "long_arrays"]
    shown = told(PROGRAMS / "collectives.py", "0", *parts, size=size, adapter=True)
    assert json.dumps(parts) in shown


def test_collectives_where_adapters_writes_are_flushed() -> None:
    shown = told(PROGRAMS / "collectives.py", "0", *PARTS, adapter=True, lacks="writes-ordering")
    assert json.dumps(PARTS) in shown


def test_what_peers_do_not_reach() -> None:
    shown = told(PROGRAMS / "unreached.py", "job")
    (line,) = (line for line in shown.splitlines() if line.startswith("{"))
    said = json.loads(line)
    assert said.pop("beyond").startswith("SegmentError: ")
    assert all(words.startswith("UnavailableError: ") for words in said.values()), said
