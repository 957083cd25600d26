"""Tools that the tests of the programs with images share: small courses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL")

from images_course import Course, Team
from train_images import options, prepare

__all__ = ["DATA", "Course", "Team", "as_before", "digests", "given", "prepare", "same", "small"]

SMALL = "--pixels 32 --batch 6 --iterations 6 --every 2"
DATA: list[str] = []  # arguments


@pytest.fixture(autouse=True, scope="module")
def as_before(pictures_folder: Path) -> Iterator[None]:
    """The pictures are there; afterwards PyTorch is as it was."""
    DATA[:] = ["--data", str(pictures_folder / "train")]
    n_threads = torch.get_num_threads()
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(n_threads)
    torch.use_deterministic_algorithms(False)


def given(arguments: str) -> Any:
    """Parsed and prepared."""
    parsed = options([*DATA, *arguments.split()])
    prepare(parsed)
    return parsed


def small(more: str = "") -> Any:
    """A training of a second."""
    return given(f"{SMALL} {more}")


def same(course: Course, other: Course, tolerance: float = 1e-9) -> None:
    """The same weights, up to rounding."""
    pairs = zip(course.model.state_dict().items(), other.model.state_dict().values(), strict=True)
    for (name, ours), theirs in pairs:
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def digests(out: str) -> list[str]:
    """Fingerprints of weights in a program's output."""
    return re.findall(r"weights: sha256 (\w+)", out)
