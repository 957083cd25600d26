"""Steps of collective calls that are interrupted and continued."""

from __future__ import annotations

from typing import Any

import pytest

from pgasdl.errors import MismatchError, PgasTimeoutError
from pgasdl.group import Steps, Unfinished


def test_a_call_inside_another_one_goes_on_where_it_was() -> None:
    unfinished: Unfinished = {}
    group: Any = object()
    made: list[str] = []

    def step(name: str, n_late: int = 0) -> str:
        if n_late and made.count(f"{name} late") < n_late:
            made.append(f"{name} late")
            raise PgasTimeoutError(name)
        made.append(name)
        return name

    def inner() -> list[str]:
        with Steps(unfinished, group, "inner", 1) as steps:
            return [steps(lambda: step("b")), steps(lambda: step("c", 2))]

    def outer() -> list[str]:
        with Steps(unfinished, group, "outer", 1) as steps:
            return [steps(lambda: step("a")), *steps(inner), steps(lambda: step("d", 1))]

    for _ in range(3):
        with pytest.raises(PgasTimeoutError):
            outer()
        with pytest.raises(MismatchError, match="outer timed out"):
            inner()
    assert outer() == ["a", "b", "c", "d"]
    assert made == ["a", "b", "c late", "c late", "c", "d late", "d"]
    assert not unfinished
    assert inner() == ["b", "c"]
