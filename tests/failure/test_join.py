"""Contexts of ranks that come and go, through a store of the user's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from folder_store import FolderStore
from support.forking import Job
from tiers import full, gate

import pgasdl
from pgasdl import BootstrapError, ConfigError, Context, PgasError, PgasTimeoutError


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(str(tmp_path))


@pytest.mark.parametrize(
    ("transport", "generations"),
    [("shm", 30), *gate([("tcp", 60)]), *full([("shm", 300)], quick=0)],
)
@pytest.mark.timeout(300)
def test_a_context_is_made_again_with_other_ranks(
    job: Callable[..., Job], tmp_path: Path, transport: str, generations: int
) -> None:
    """Fewer, more, in another order, after an abort, several at once."""
    ranks = job("joins.py", 4, tmp_path, generations, PGASDL_TRANSPORT=transport)
    assert ranks.ended(seconds=250) == [0] * 4, ranks.transcript()
    assert [ranks.event(rank, "joined")["rank"] for rank in range(4)] == [0, 1, 2, 3]
    # Nothing but the marks of names that were used.
    assert all("_joined_" in left.name for left in tmp_path.iterdir())


def each(*calls: Callable[[], object]) -> list[Any]:
    """Make the calls at once, by a thread each; what each returned or raised."""

    def one(call: Callable[[], object]) -> object:
        try:
            return call()
        except PgasError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(one, calls))


def joining(store: FolderStore, uuid: str, rank: int, size: int) -> Callable[[], Context]:
    return lambda: pgasdl.join(store, uuid, rank=rank, size=size, timeout=10)


def test_several_contexts_of_one_process(store: FolderStore) -> None:
    pairs = [
        each(joining(store, uuid, 0, 2), joining(store, uuid, 1, 2)) for uuid in ("one", "two")
    ]
    with pgasdl.init(rank=0, size=1) as own:
        own.barrier()
        for pair in reversed(pairs):
            assert each(*(context.barrier for context in pair)) == [None, None]
        for pair in pairs:
            assert each(*(context.close for context in pair)) == [None, None]
        own.barrier()


def test_a_name_is_used_once(store: FolderStore) -> None:
    with pgasdl.join(store, "once", rank=0, size=1):
        pass
    with pytest.raises(ConfigError, match="rank 0 of 1: the uuid 'once' was already used"):
        pgasdl.join(store, "once", rank=0, size=1)


def test_ranks_that_disagree_on_the_size(store: FolderStore) -> None:
    got = each(*(joining(store, "sizes", *place) for place in ((0, 2), (1, 3), (2, 3))))
    assert all(isinstance(error, ConfigError) for error in got), got
    assert [str(error) for error in got] == [
        f"rank {rank}: the ranks have sizes {sizes}: give all the same"
        for rank, sizes in enumerate([[2, 3], [2, 3, 3], [2, 3, 3]])
    ]


def test_a_rank_that_does_not_come(store: FolderStore) -> None:
    begin = time.monotonic()
    with pytest.raises(PgasTimeoutError, match="rank 0: not all 2 ranks came to the store"):
        pgasdl.join(store, "alone", rank=0, size=2, timeout=0.2)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"store": {}}, "a dict is no store: no set, wait, add, delete_key"),
        ({"uuid": ""}, "uuid is ''; it is a text"),
        ({"uuid": 7}, "uuid is 7; it is a text"),
        ({"rank": 2}, "rank 2 of 2: the rank must be from 0 to 1"),
        ({"transport": "mpi"}, "joins by pgasdl.init"),
        ({"tranport": "shm"}, "unknown argument 'tranport'"),
    ],
)
def test_wrong_arguments(store: FolderStore, changed: dict[str, object], says: str) -> None:
    """Nothing is in the store afterwards."""
    arguments = {"store": store, "uuid": "wrong", "rank": 0, "size": 2, **changed}
    with pytest.raises(PgasError, match=says):
        pgasdl.join(**arguments)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        store.wait(["pgasdl/wrong/joined/0"], timedelta(0))


def test_several_machines_need_a_common_secret(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.set("pgasdl/far/host/1", "2 another machine")
    with pytest.raises(BootstrapError, match="PGASDL_SECRET_FILE"):
        pgasdl.join(store, "far", rank=0, size=2, timeout=2)
