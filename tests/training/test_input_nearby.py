"""Ranges that are read at once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgasdl import DataError
from pgasdl.input import nearby
from pgasdl.input.nearby import Nearby, merged

DATA = random.Random(0).randbytes(300_000)


class Reads:
    """Bytes, of which some cannot be read; it notes the ranges that were asked for."""

    def __init__(self, damaged: range = range(0)) -> None:
        self.damaged, self.ranges = damaged, list[tuple[int, int]]()

    def __call__(self, address: int, nbytes: int) -> bytearray:
        self.ranges.append((address, nbytes))
        if range(max(address, self.damaged.start), min(address + nbytes, self.damaged.stop)):
            raise DataError("damaged")
        return bytearray(DATA[address : address + nbytes])


@given(st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 90_000)), max_size=8), st.data())
def test_every_range_is_read_as_it_is(ranges: list[tuple[int, int]], data: st.DataObject) -> None:
    ranges += [(at + n, 700) for at, n in ranges]
    order = data.draw(st.permutations(ranges))
    damaged = range(*sorted(data.draw(st.tuples(*[st.integers(0, len(DATA))] * 2))))
    read = Nearby(order, Reads(damaged))
    for at, n in data.draw(st.permutations(order)):
        if range(max(at, damaged.start), min(at + n, damaged.stop)):
            with pytest.raises(DataError):
                read(at, n)
        else:
            assert read(at, n) == DATA[at : at + n]


def test_small_neighbours_are_one_read() -> None:
    reads, ranges = Reads(), [(at, 1000) for at in range(0, 100_000, 2000)]
    read = Nearby(ranges, reads)
    for at, n in ranges:
        assert read(at, n) == DATA[at : at + n]
    assert [at for at, _ in reads.ranges] == [0, 66_000]
    assert all(n <= nearby._WINDOW for _, n in reads.ranges)
    assert list(merged(ranges)) == [(0, 99_000)]


@pytest.mark.parametrize("ranges", [[(90_000, 9), (0, 9)], [(0, 70_000), (70_000, 70_000)]])
def test_others_are_read_alone(ranges: list[tuple[int, int]]) -> None:
    reads = Reads()
    read = Nearby(ranges, reads)
    for each in ranges:
        read(*each)
    assert reads.ranges == ranges
