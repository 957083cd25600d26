"""The pool's allocator: blocks never overlap, and free neighbours become one block."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pgasdl.buffers import ALIGNMENT, aligned
from pgasdl.pool import Arena

NBYTES = 64 * 100


def check_whole(arena: Arena, taken: dict[int, int]) -> None:
    """Free and taken blocks cover everything once; no two free ones touch."""
    blocks = sorted([*arena.free, *((at, aligned(nbytes)) for at, nbytes in taken.items())])
    end = 0
    for at, length in blocks:
        assert at == end and at % ALIGNMENT == 0 and length > 0, blocks
        end = at + length
    assert end == arena.nbytes
    assert arena.free == sorted(arena.free)
    ends = {at + length for at, length in arena.free}
    assert not ends & {at for at, _ in arena.free}, arena.free


@given(st.lists(st.one_of(st.integers(1, NBYTES // 4), st.floats(0, 1, exclude_max=True))))
def test_random_blocks(steps: list[int | float]) -> None:
    """An integer takes so many bytes, a fraction frees the block at that place among all."""
    arena = Arena(NBYTES)
    taken: dict[int, int] = {}
    for step in steps:
        if isinstance(step, int):
            longest = max((length for _, length in arena.free), default=0)
            at = arena.take(step)
            assert (at is None) == (aligned(step) > longest)
            if at is not None:
                assert at not in taken
                taken[at] = step
        elif taken:
            at = sorted(taken)[int(step * len(taken))]
            del taken[at]
            arena.give_back(at)
        check_whole(arena, taken)
    for at in taken:
        arena.give_back(at)
    assert arena.free == [(0, NBYTES)]


def test_the_first_block_that_is_long_enough() -> None:
    arena = Arena(64 * 6)
    offsets = [arena.take(64) for _ in range(6)]
    assert offsets == [0, 64, 128, 192, 256, 320]
    assert arena.free == [] and arena.take(1) is None
    for offset in (64, 192, 256):
        arena.give_back(offset)
    assert arena.take(65) == 192
    assert arena.take(1) == 64
    assert arena.free == []


def test_nothing_at_all() -> None:
    arena = Arena(0)
    assert arena.free == [] and arena.take(1) is None
