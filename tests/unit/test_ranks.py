"""Tests that are programs of ranks fail with a rank, and hand on their parameters."""

from __future__ import annotations

from typing import Any

import pytest
from support.ranks import on_ranks


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("mapped", [True, False])
@on_ranks(None, "mapped", seed=1)
def test_ranks_get_contexts_and_parameters(ctx: Any, size: int, mapped: bool) -> None:
    assert (ctx.size, ctx.mapped) == (size, mapped)


def test_a_rank_that_fails_fails_the_test() -> None:
    @on_ranks(2)
    def test(ctx: Any) -> None:
        assert ctx.rank == 0, "on purpose"

    with pytest.raises(AssertionError, match="on purpose"):
        test()
