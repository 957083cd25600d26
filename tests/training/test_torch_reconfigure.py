"""Process groups whose members change, as PyTorch 2.14 and newer have them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import pytest

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402
from torch._C._distributed_c10d import ErrorType  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402

from pgasdl.torch.backend.reconfigure import ReconfigurableGroup  # noqa: E402

SIZE = 3


class Ranks:
    """A group for each rank, which are threads."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self._threads = ThreadPoolExecutor(SIZE)
        self.groups = [self.new(rank) for rank in range(SIZE)]

    def new(self, rank: int) -> ReconfigurableGroup:
        return ReconfigurableGroup(self._store, rank, SIZE, timedelta(seconds=30))

    def each(self, call: Callable[[Any], Any], ranks: tuple[int, ...] = (0, 1, 2)) -> list[Any]:
        return list(self._threads.map(lambda rank: call(self.groups[rank]), ranks))

    def reconfigure(self, uuid: int, *ranks: int, as_set: bool = False) -> None:
        handles: Any = [self.groups[rank].get_reconfigure_handle() for rank in ranks]
        if as_set:
            handles = set(handles)
        options = SimpleNamespace(uuid=uuid, handles=handles, timeout=timedelta(seconds=30))
        assert all(self.each(lambda group: group.reconfigure(options).wait(), ranks))

    def close(self) -> None:
        self.each(lambda group: group.shutdown())
        self._threads.shutdown()


@pytest.fixture
def ranks() -> Any:
    made = Ranks()
    yield made
    made.close()


def total(group: ReconfigurableGroup) -> float:
    tensor = torch.full((4,), group.rank() + 1.0)
    group.allreduce([tensor], c10d.AllreduceOptions()).wait()
    assert len(set(tensor.tolist())) == 1
    return float(tensor[0])


def send_on(group: ReconfigurableGroup) -> None:
    given, got = torch.full((4,), float(group.rank())), torch.zeros(4)
    works = [
        group.send([given], (group.rank() + 1) % group.size(), 0),
        group.recv([got], (group.rank() - 1) % group.size(), 0),
    ]
    for work in works:
        work.wait()
    assert got.tolist() == [float((group.rank() - 1) % group.size())] * 4


def test_it_shrinks_grows_merges_and_numbers_its_ranks_anew(ranks: Ranks) -> None:
    ranks.reconfigure(1, 0, 1, 2)
    assert ranks.each(total) == [6, 6, 6]
    ranks.each(send_on)
    ranks.reconfigure(2, 2, 0)
    assert [(group.rank(), group.size()) for group in ranks.groups] == [(1, 2), (1, 3), (0, 2)]
    assert ranks.each(total, (0, 2)) == [3, 3]
    ranks.reconfigure(3, 1)
    assert ranks.each(total) == [3, 1, 3]
    ranks.reconfigure(4, 0, 1, 2, as_set=True)
    assert sorted(group.rank() for group in ranks.groups) == [0, 1, 2]
    assert ranks.each(total) == [6, 6, 6]
    ranks.each(send_on)


def test_it_goes_on_after_a_loss_with_a_new_rank(ranks: Ranks) -> None:
    ranks.reconfigure(1, 0, 1, 2)
    assert ranks.groups[0].get_error() == ErrorType.SUCCESS
    lost = ranks.groups[1]
    lost.context.close(failed=True)
    for group in (ranks.groups[0], ranks.groups[2]):
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            total(group)
        assert group.get_error() == ErrorType.COMM_ERROR
    lost.shutdown()
    ranks.groups[1] = ranks.new(1)
    ranks.reconfigure(2, 0, 1, 2)
    assert ranks.each(total) == [6, 6, 6]
    assert ranks.groups[0].get_error() == ErrorType.SUCCESS


def test_what_is_under_way_fails(ranks: Ranks) -> None:
    """With one that leaves the group; then the others do without it."""
    ranks.reconfigure(1, 0, 1, 2)
    tensor = torch.ones(4)
    works = [ranks.groups[rank].recv([tensor], 2, 0) for rank in (0, 1)]
    ranks.reconfigure(2, 2)
    for work in works:
        with pytest.raises(dist.DistBackendError, match="rank 2"):
            work.wait()
    ranks.groups[0].abort()
    ranks.reconfigure(3, 1, 0)
    assert ranks.each(total, (0, 1)) == [3, 3]


@pytest.mark.parametrize(
    ("uuid", "handles", "says"),
    [
        (1, ["own"], "the uuid '1' was already used"),
        (2, ["another"], "1 handles: each rank's once, this one's among them"),
        (2, ["own", "own"], "2 handles: each rank's once, this one's among them"),
        (2, [], "0 handles: each rank's once"),
    ],
)
def test_what_is_refused(ranks: Ranks, uuid: int, handles: list[str], says: str) -> None:
    ranks.reconfigure(1, 0)
    group = ranks.groups[0]
    own = group.get_reconfigure_handle()
    order = [own if handle == "own" else handle for handle in handles]
    options = SimpleNamespace(uuid=uuid, handles=order, timeout=None)
    with pytest.raises(dist.DistBackendError, match=says):
        group.reconfigure(options)
    assert total(group) == 1  # it has the members that it had


def test_before_it_has_members_calls_are_refused(ranks: Ranks) -> None:
    for call in (total, send_on):
        with pytest.raises(dist.DistBackendError, match="has no members: reconfigure it first"):
            call(ranks.groups[0])


if hasattr(c10d, "ReconfigureOptions"):

    def test_programs_of_pytorch_reconfigure(forked: Callable[..., str], tmp_path: Path) -> None:
        """By dist's own functions; DDP divides by the members that there are."""
        shown = forked(3, jobs.PROGRAMS / "reconfigure.py", tmp_path / "store", torchrun=True)
        assert shown.count("went on") == 3
