"""The programs of ``apps/`` can be imported; data sets, and ranks, that several tests use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import FOLDERS
from support import forking
from support.forking import Zygote
from support.places import APPS

from pgasdl.input import Records

sys.path.append(str(APPS))


@pytest.fixture(scope="session")
def forked() -> Iterator[Callable[..., str]]:
    """``jobs.run`` for programs of PyTorch, on ranks forked from a process that has imported it.

    With ``torchrun=True`` they find its variables. What needs a new interpreter, or the launcher
    itself, has to be started by ``jobs.run`` or ``launcher.torchrun``.
    """
    zygote = Zygote("torch", "torch.distributed.tensor", "pgasdl.torch", "pgasdl.loopback")

    def run(size: int, program: Path, *arguments: object, **options: Any) -> str:
        return forking.run(
            zygote, size, program, *arguments, timeout=200, folders=FOLDERS,
            GLOO_SOCKET_IFNAME="lo", **options,
        )  # fmt: skip

    yield run
    zygote.close()


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Records]:
    """43 records in three files."""
    from input_tools import records, saved

    with Records(saved(tmp_path, records(43))) as found:
        yield found


@pytest.fixture(scope="session")
def pictures_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pictures on which ``apps/train_images.py`` trains."""
    for package in ("PIL", "skimage", "sklearn"):
        pytest.importorskip(package)
    import pictures

    folder = tmp_path_factory.mktemp("data") / "pictures"
    pictures.make(folder)
    return folder
