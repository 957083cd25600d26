"""The programs of ``apps/`` can be imported; and data sets that several tests read."""

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


@pytest.fixture(scope="session")
def pictures_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pictures on which ``apps/train_images.py`` trains."""
    for package in ("PIL", "skimage", "sklearn"):
        pytest.importorskip(package)
    import pictures

    folder = tmp_path_factory.mktemp("data") / "pictures"
    pictures.make(folder)
    return folder
