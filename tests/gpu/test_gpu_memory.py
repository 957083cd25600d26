"""Memory on GPUs as Python has it: segments, what other libraries offer, `pgasdl topo`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support import fake_driver
from support.environment import environment
from support.launcher import PGASDL
from support.starting import finished, succeeded

pytestmark = pytest.mark.gate  # the fake driver is built first

PROGRAMS = Path(__file__).parent / "programs"


def test_memory_on_gpus() -> None:
    env = environment(**fake_driver.variables(devices=2))
    output = succeeded([sys.executable, str(PROGRAMS / "memory.py")], env=env, timeout=120)
    assert output.split() == ["copies", "interfaces", "bound", "refusals"]


def gpus(**settings: object) -> dict[str, Any]:
    """The lines of ``pgasdl topo`` about GPUs."""
    env = environment(**fake_driver.variables(**settings))
    done = finished([*PGASDL, "topo", "--json"], env=env, timeout=60)
    told: dict[str, Any] = json.loads(done.stdout)["gpus"]
    return told


def test_the_table_of_gpus() -> None:
    told = gpus(devices=3)
    assert [gpu["peers"] for gpu in told["gpus"]] == [[1, 2], [0, 2], [0, 1]]
    assert {(gpu["dmabuf"], gpu["writes_ordering"]) for gpu in told["gpus"]} == {(True, 100)}
    assert (told["cuda"], told["missing"]) == ("12.4", "")
    (alone,) = gpus(devices=1, lacks="dmabuf,posix-handles,peer")["gpus"]
    assert (alone["dmabuf"], alone["posix_handles"], alone["peers"]) == (False, False, [])
    assert "no CUDA-capable device" in gpus(devices=0)["missing"]
