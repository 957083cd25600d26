"""Tests over a real verbs device: each boots guests of tests/softroce and runs jobs there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for folder in ("softroce", "training"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))


@pytest.fixture(scope="session", autouse=True)
def guests_can_run() -> None:
    """Skip by name on a machine that cannot boot guests; fail where CI requires them."""
    import rig

    rig.require()
