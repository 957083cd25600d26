"""The script for a machine with a GPU, on the fake driver and with tiny sizes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.starting import finished, succeeded

pytestmark = pytest.mark.gate  # the fake driver is built first

SCRIPT = Path(__file__).with_name("on_device.py")
# The parts that need a driver with graphs, MPS, compute-sanitizer, two GPUs.
ABSENT = {"graphs", "mps", "sanitizer", "several"}


def shown(env: dict[str, str], folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The script's output."""
    out = folder / "out.json"
    command = [sys.executable, str(SCRIPT), "--smoke", "--out", str(out), *arguments]
    told = succeeded(command, env=env, timeout=200)
    assert "all checks held" in told
    report = json.loads(out.read_text())
    assert report["held"]
    parts: list[dict[str, Any]] = report["parts"]
    return parts


def test_one_part(fake: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    (part,) = shown(fake(devices=1), tmp_path, "--only", "one_sided")
    assert part["status"] == "done"
    assert [finding["value"] for finding in part["findings"]] == ["holds"] * 4


def test_a_machine_with_two(fake: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    (part,) = shown(fake(devices=2), tmp_path, "--only", "several")
    assert part["status"] == "done"
    assert [finding["value"] for finding in part["findings"]] == ["holds"] * 2


PINNED = """
import sys
sys.path[:0] = sys.argv[1:]
from cuda_arrays import Device
from on_device import driver
with Device():
    where = {driver.Pinned(4096).address for _ in range(20)}
print(len(where))
"""


def test_pinned_pages_may_come_again(fake: Callable[..., dict[str, str]]) -> None:
    """They are given back before they go: the driver refuses what it has registered already."""
    folders = [str(SCRIPT.parent), str(SCRIPT.parent / "programs")]
    command = [sys.executable, "-c", PINNED, *folders]
    assert int(succeeded(command, env=fake(devices=1), timeout=60)) < 20


@pytest.mark.full
def test_all_parts(fake: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    parts = {part["part"]: part for part in shown(fake(devices=1), tmp_path, "--all")}
    for name, part in parts.items():
        possible = {"done", "not available"} if name in ABSENT else {"done"}
        assert part["status"] in possible, part
        assert part["findings"]


def test_without_a_gpu(fake: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--smoke", "--out", str(out), "--only", "puts"]
    done = finished(command, env=fake(devices=0), timeout=60)
    assert done.returncode == 1
    (part,) = json.loads(out.read_text())["parts"]
    assert part["status"] == "not available"
    assert "CUDA_ERROR_NO_DEVICE" in part["findings"][0]["value"]
