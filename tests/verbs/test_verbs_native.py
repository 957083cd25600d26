"""The C++ tests of transport verbs, in a guest: elsewhere they find no device and end at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import rig

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))
from building import Build, missing_tools

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

# And the devices of their guests.
PROGRAMS = (
    ("test_verbs", "dummy"),
    ("test_verbs_faults", "dummy"),
    ("test_verbs_settings", "dummy"),
    ("test_verbs_order", "dummy"),
    ("test_verbs_rails", "rails"),
    ("test_verbs_rails", "cables"),
)


@pytest.fixture(scope="module")
def build() -> Build:
    if lacks := missing_tools():
        pytest.skip(f"needs {', '.join(lacks)}")
    made = Build("plain")
    made.make(*{program for program, _ in PROGRAMS})
    return made


@pytest.mark.parametrize(("program", "mode"), PROGRAMS)
def test_program(build: Build, program: str, mode: str) -> None:
    result = rig.run([str(build.folder / "tests" / program)], mode=mode, timeout=200)
    result.check()
    assert result.output.splitlines()[-1] == "ok", result.output  # it had a device
