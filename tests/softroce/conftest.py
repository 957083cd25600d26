"""Every test here boots guests: where that is impossible it is skipped by name, or fails in CI."""

from __future__ import annotations

import pytest
import rig


@pytest.fixture(scope="session", autouse=True)
def _guests_can_run() -> None:
    rig.require()
