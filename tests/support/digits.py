"""The training app, short, and the weights its ranks must end with: those of ``pgasdl run``."""

from __future__ import annotations

import functools
import shlex
import tempfile
from pathlib import Path

import numpy as np

from support.launcher import run
from support.places import APPS
from support.requiring import require_modules


def training(saved: Path, *more: str) -> list[str]:
    """The app and its arguments; rank 0 saves the weights, if all have the same.

    Skips the test where modules are missing that only ranks import.
    """
    require_modules("torch", "sklearn")
    short = ["--epochs", "1", "--batch", "120", "--picture="]
    return [str(APPS / "train_digits.py"), *short, "--check-bits", f"--save={saved}", *more]


def trains(saved: Path, *more: str) -> str:
    """The command of a rank that trains, for a script."""
    return shlex.join(["python3", *training(saved, *more)])


def weights(saved: Path) -> dict[str, bytes]:
    """Each layer's weights, bit for bit."""
    with np.load(saved) as layers:
        return {name: layers[name].tobytes() for name in layers.files}


@functools.cache
def _of_pgasdl_run(n_ranks: int, *more: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder, "weights.npz")
        done = run("-n", str(n_ranks), *training(own, *more), timeout=120, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        return weights(own)


def require_same(n_ranks: int, saved: Path, *more: str) -> None:
    """Compare weights with those of ``pgasdl run``, whose ranks use transport shm."""
    assert weights(saved) == _of_pgasdl_run(n_ranks, *more)
