"""Random training programs: attached ranks train the model of one process, or refuse to."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tiers import full
from training_programs import Program


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", full([range(n, n + 50) for n in range(0, 1000, 50)], quick=2))
def test_random_programs(seeds: range) -> None:
    ends = [Program(seed).check() for seed in seeds]
    assert ends.count("same") >= len(ends) // 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [2000, 3115, 3897, 5283, 7442, 7685])
def test_programs_that_were_wrong(seed: int) -> None:
    """A gradient that only other ranks had at a step, or nobody, and that the program keeps."""
    assert Program(seed).check() == "same"
