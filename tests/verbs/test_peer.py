"""A peer that is not our code: pyverbs joins a job, writes into a segment, and is written to."""

from __future__ import annotations

import sys
from pathlib import Path

import hosts
import pytest
from hosts import Job
from support.requiring import lacking

pytestmark = pytest.mark.full

PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")


def require_pyverbs() -> None:
    """Debian's pyverbs is built for Debian's version of Python."""
    version = f"cpython-{sys.version_info.major}{sys.version_info.minor}"
    if not list(PYVERBS.glob(f"qp.{version}-*.so")):
        lacking(f"no pyverbs for {version} in {PYVERBS} (package python3-pyverbs)")


def test_pyverbs_takes_part(tmp_path: Path) -> None:
    require_pyverbs()
    env = {"PGASDL_TRANSPORT": "verbs", "PGASDL_LOG": "warning"}
    job = Job("peer", "verbs/programs/strangers.py", [[0], [1]], env=env)
    story = hosts.run(tmp_path, [job])["peer"].check(2)
    assert story.of(0) == [
        "was written to and notified by pyverbs",
        "read from and added to memory of pyverbs",
        "complete",
    ]
    assert story.of(1) == ["was written to and notified by pgasdl", "complete"]
