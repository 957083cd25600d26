"""Which rank reads what: the same batches for any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pgasdl.input import Batches
from pgasdl.input.batches import InOrder


@pytest.mark.parametrize("last", ["drop", "fill"])
@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize(("n_records", "batch"), [(53, 10), (50, 10), (11, 5), (7, 7)])
def test_global_batches_do_not_depend_on_the_ranks(
    n_records: int, batch: int, seed: int | None, last: Any
) -> None:
    alone = Batches(n_records, batch, seed=seed, last=last)
    n_iterations = 3 * alone.per_epoch
    expected = [rows.tolist() for rows in alone.iterations(0, n_iterations)]
    assert [len(rows) for rows in expected] == [batch] * n_iterations
    for size in range(1, 6):
        ranks = [
            Batches(n_records, batch, rank=rank, size=size, seed=seed, last=last)
            for rank in range(size)
        ]
        parts = [list(each.iterations(0, n_iterations)) for each in ranks]
        assert {len(part) for part in parts} == {n_iterations}
        for iteration, whole in enumerate(expected):
            shares = [part[iteration].tolist() for part in parts]
            assert [row for rows in shares for row in rows] == whole
            assert all(1 <= len(rows) <= ranks[0].largest for rows in shares)
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_an_epoch_has_every_record_once_and_its_own_order() -> None:
    batches = Batches(60, 12, seed=1)
    epochs = [
        np.concatenate([batches.whole(epoch * 5 + place) for place in range(5)]) for epoch in (0, 1)
    ]
    for order in epochs:
        assert sorted(order) == list(range(60))
    assert not np.array_equal(*epochs)
    assert not np.array_equal(epochs[0][:12], Batches(60, 12, seed=2).whole(0))
    assert Batches(60, 12, seed=None).whole(6).tolist() == list(range(12, 24))
    # Another version of NumPy has to give the same.
    assert Batches(20, 5, seed=1).whole(0).tolist() == [1, 10, 8, 16, 15]


def test_rows_are_the_callers_to_change() -> None:
    batches = Batches(60, 12)
    rows = batches.rows(0)
    before = rows.copy()
    rows[:] = 3
    assert np.array_equal(batches.rows(0), before)


def test_records_that_are_left_over() -> None:
    dropped, filled = Batches(10, 4, seed=0), Batches(10, 4, seed=0, last="fill")
    assert (dropped.per_epoch, filled.per_epoch) == (2, 3)
    order = np.concatenate([filled.whole(0), filled.whole(1), filled.whole(2)])
    assert sorted(order[:10]) == list(range(10)) and np.array_equal(order[10:], order[:2])
    assert Batches(3, 8, last="fill", seed=None).whole(0).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_training_resumes_at_any_iteration_on_any_number_of_ranks() -> None:
    whole = [rows.tolist() for rows in Batches(53, 10, seed=5).iterations(0, 13)]
    for start in (0, 3, 5, 12, 13):
        resumed = Batches(53, 10, seed=5).iterations(start, 13)
        assert len(resumed) == 13 - start
        assert [rows.tolist() for rows in resumed] == whole[start:]
        assert [rows.tolist() for rows in resumed] == whole[start:]  # a second time, too
    halves = [Batches(53, 10, rank=rank, size=2, seed=5).rows(8).tolist() for rank in (0, 1)]
    assert halves[0] + halves[1] == whole[8]


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_records": 0},
        {"batch": 2, "size": 3},
        {"rank": 1},
        {"rank": -1},
        {"seed": -1},
        {"last": "keep"},
        {"batch": 11},
    ],
)
def test_batches_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Batches(**{"n_records": 10, "batch": 4, **wrong})


def test_iterations_that_are_refused() -> None:
    batches = Batches(10, 4)
    for first, last in ((-1, 2), (3, 2)):
        with pytest.raises(ValueError, match="iterations"):
            batches.iterations(first, last)
    with pytest.raises(ValueError, match="iteration -1"):
        batches.whole(-1)


@pytest.mark.parametrize("mix", [1, 3, 40])
def test_chunks_are_mixed_some_at_a_time(mix: int) -> None:
    chance = np.random.default_rng(1)
    chunks = chance.integers(100, 110, 200) * 7  # 10 chunks of any size, with gaps in the numbers
    batches = Batches(200, 20, seed=4, chunks=chunks, mix=mix)
    taken = []
    for epoch in (0, 1):
        order = np.concatenate([batches.whole(epoch * 10 + place) for place in range(10)])
        assert sorted(order) == list(range(200))
        groups: list[set[int]] = []
        while len(order):
            first = list(dict.fromkeys(chunks[order].tolist()))[:mix]
            count = int(np.isin(chunks, first).sum())
            mine, order = order[:count], order[count:]
            assert set(chunks[mine].tolist()) == set(first)  # no other chunk comes in between
            assert not np.array_equal(mine, np.sort(mine))
            if mix > 1:
                changes = np.count_nonzero(np.diff(chunks[mine]))
                assert changes > len(first) or len(first) == 1  # they are mixed
            groups.append(set(first))
        assert len(groups) == -(-10 // mix)
        taken.append(groups)
    assert mix == 40 or taken[0] != taken[1]
    again = Batches(200, 20, seed=4, chunks=chunks, mix=mix, rank=1, size=2)
    assert np.array_equal(again.rows(13), batches.whole(13)[10:])
    in_order = Batches(200, 20, seed=None, chunks=chunks, mix=mix)
    assert in_order.whole(1).tolist() == list(range(20, 40))


def test_chunks_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(9,\): one for each of 10"):
        Batches(10, 4, chunks=np.zeros(9, int))
    with pytest.raises(ValueError, match="mix 0"):
        Batches(10, 4, chunks=np.zeros(10, int), mix=0)


class Counted:
    """Records whose number takes time to find; it notes whether somebody has waited."""

    def __init__(self, count: int, seen: int) -> None:
        self.count, self.seen, self.waited = count, seen, False

    def __len__(self) -> int:
        self.waited = True
        return self.count

    def reaches(self, count: int) -> bool:
        return count <= self.seen or count <= len(self)


@pytest.mark.parametrize("last", ["drop", "fill"])
@pytest.mark.parametrize(("n_records", "seen"), [(53, 30), (50, 50), (50, 0), (9, 5), (10, 10)])
def test_batches_in_order_of_records_that_are_not_counted_yet(
    n_records: int, seen: int, last: Any
) -> None:
    for rank in range(3):
        options = {"rank": rank, "size": 3, "last": last}
        records = Counted(n_records, seen)
        if n_records < 10 and last == "drop":
            with pytest.raises(ValueError, match="there are 9 records"):
                InOrder(records, 10, **options)
            continue
        found = InOrder(records, 10, **options)
        assert records.waited == (seen < 10)
        wanted = Batches(n_records, 10, seed=None, **options)
        for iteration, rows in enumerate(wanted.iterations(0, 3 * wanted.per_epoch)):
            assert np.array_equal(found.rows(iteration), rows)
            assert np.array_equal(found.whole(iteration), wanted.whole(iteration))
            assert found.epoch(iteration) == wanted.epoch(iteration)
            assert records.waited == (iteration >= seen // 10)
        assert found.largest == wanted.largest and found.seed is None
        assert (found.n_records, found.per_epoch) == (n_records, wanted.per_epoch)
    with pytest.raises(ValueError, match="at least one record"):
        InOrder(Counted(9, 9), 0, rank=0, size=1, last="drop")
