"""The programs of ``apps/`` can be imported; and striped files that several tests read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.places import APPS

from pgasdl.input import StripedFiles

sys.path.append(str(APPS))


@pytest.fixture
def data(tmp_path: Path) -> Iterator[StripedFiles]:
    """43 records in three files."""
    from input_tools import striped

    with StripedFiles(striped(tmp_path, 43)) as files:
        yield files
