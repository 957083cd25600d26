"""Needs of a test: skip it by name without them, or fail it where CI requires all."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest


def lacking(why: str) -> None:
    """Skip the test, or fail it where CI requires all."""
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why, allow_module_level=True)


def require_programs(**packages: str) -> None:
    """Skip the test where programs are missing; ``packages``: Debian's, by program."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = sorted(
        package for program, package in packages.items() if shutil.which(program, path=path) is None
    )
    if missing:
        lacking(f"apt-get install {' '.join(missing)}")


def require_modules(*names: str) -> None:
    """Skip the test, or a module of tests, where modules of the example programs are missing.

    It imports none: scikit-learn, with SciPy, takes as long as PyTorch.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            lacking(f"no {name}: pip install 'pgasdl[apps]'")
