"""Every test here boots guests: it is skipped by name where that cannot be, and fails under CI."""

from __future__ import annotations

import pytest
import rig


@pytest.fixture(scope="session", autouse=True)
def _guests_can_run() -> None:
    rig.require()
