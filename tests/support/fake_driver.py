"""The fake CUDA driver, which processes find in front of any driver of the machine."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import pytest

from support.places import TESTS

sys.path.insert(0, str(TESTS / "native"))
from building import Build, missing_tools


@functools.cache
def built() -> Build:
    """Build the fake driver and its test program, or skip the test."""
    if missing := missing_tools():
        pytest.skip(f"building the fake CUDA driver needs {', '.join(missing)}")
    build = Build("plain")
    build.make("fake_driver", "fake_rdma", "test_cuda")
    return build


def folder() -> Path:
    """Where the ``libcuda.so.1`` lies."""
    return built().folder / "fake_driver"


def variables(*, adapter: bool = False, **settings: object) -> dict[str, str]:
    """Environment variables of a process that is to use the fake driver.

    Parameters
    ----------
    adapter : adapters reach its memory
    settings : the fake driver's own, in lower case and without its prefix: ``devices=1``,
        ``lacks="vmm,dmabuf"``; ``tests/gpu/fake_driver/fake_driver.hpp`` lists them
    """
    own = {f"FAKE_{name.upper()}": str(value) for name, value in settings.items()}
    paths = [str(folder()), os.environ.get("LD_LIBRARY_PATH", "")]
    own |= {"LD_PRELOAD": str(folder() / "libcuda_rdma.so")} if adapter else {}
    return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))} | own
