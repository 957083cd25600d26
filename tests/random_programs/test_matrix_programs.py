"""Programs of matrix operations, drawn by hypothesis, against NumPy."""

from __future__ import annotations

from typing import Any

import hypothesis
import matrix_programs
import pytest
from hypothesis import HealthCheck, given, settings
from matrix_steps import PROGRAMS


def run_many(examples: int, seed: int | None = None) -> None:
    """Run programs, of a seed or of chance."""
    about: dict[str, Any] = {} if seed is None else {"database": None}

    @settings(max_examples=examples, suppress_health_check=[*HealthCheck], **about)
    @given(PROGRAMS)
    def one(program: Any) -> None:
        matrix_programs.run(program)

    if seed is not None:
        one = hypothesis.seed(seed)(one)
    one()


def test_matrices_do_as_numpy() -> None:
    run_many(40)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_matrices_do_as_numpy_in_many_programs() -> None:
    run_many(2000)


@pytest.mark.timeout(0)
def test_as_many_as_are_wanted(request: pytest.FixtureRequest) -> None:
    seeds = request.config.getoption("--seeds", default=None)
    if not seeds:
        pytest.skip("--seeds FROM:TO runs more: as many programs, of a seed for each 100")
    begin, end = map(int, seeds.split(":"))
    for seed in range(begin, end, 100):
        run_many(min(100, end - seed), seed)
