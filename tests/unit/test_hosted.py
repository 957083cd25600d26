"""The store that a rank serves: another rank goes on serving when that one is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from raw_rank import JOB, SECRET

from pgasdl.errors import PeerLostError, PgasTimeoutError
from pgasdl.runtime.bootstrap import HostedStore, StoreServer
from pgasdl.topology import Launch

N_RANKS = 3


@pytest.fixture
def ranks() -> Iterator[list[HostedStore]]:
    """Ranks that have met, as threads."""
    server = StoreServer(SECRET, N_RANKS, job_id=JOB)

    def join(rank: int) -> HostedStore:
        launch = Launch("torchrun", rank, N_RANKS, rank, N_RANKS, JOB)
        own = server if rank == 0 else None
        store = HostedStore(server.address, SECRET, launch, JOB, 10.0, server=own)
        assert store.exchange("who", bytes([rank])) == [b"\0", b"\1", b"\2"]
        return store

    with ThreadPoolExecutor() as pool:
        stores = list(pool.map(join, range(N_RANKS)))
    yield stores
    for store in stores:
        store.close(drain=0.0)


def lose(store: HostedStore) -> None:
    """End a rank's connections and its server, as kill -9 does."""
    assert store._server is not None
    store._server.close()
    store.close(drain=0.0)


def look() -> None:
    pass


def test_survivors_get_what_was_given_before_the_loss(ranks: list[HostedStore]) -> None:
    ranks[2].put("early", b"1")
    ranks[2].put("deleted", b"1")
    ranks[2].delete("deleted")
    token = ranks[1].token
    lose(ranks[0])
    with pytest.raises(PeerLostError, match="rank 0, which serves the store"):
        ranks[1].get("early")
    with ThreadPoolExecutor() as pool:
        # Rank 1 serves once it comes itself; until then rank 2 waits.
        late = pool.submit(ranks[2].go_on_without, {0}, 10.0, look)
        assert not late.done()
        ranks[1].go_on_without({0}, 10.0, look)
        late.result(10)
        assert ranks[1].get("early", owner=2) == b"1"
        with pytest.raises(PgasTimeoutError):
            ranks[1].get("deleted", 0)
        pair = [pool.submit(ranks[rank].gather, "pair", [1, 2], 10.0) for rank in (1, 2)]
        for rank in (1, 2):
            ranks[rank].put(f"pair/{rank}", bytes([rank]))
        assert [each.result(10) for each in pair] == [[b"\1", b"\2"]] * 2
    assert {ranks[1].token, ranks[2].token} == {token}
    lose(ranks[1])
    ranks[2].go_on_without({0, 1}, 10.0, look)
    assert ranks[2].get("early") == b"1"


def test_nobody_moves_while_the_rank_that_serves_is_there(ranks: list[HostedStore]) -> None:
    ranks[2].close()
    ranks[1].go_on_without({2}, 10.0, look)
    ranks[1].put("a", b"1")
    assert ranks[0].get("a") == b"1"


def test_wait_for_the_next_to_serve_has_an_end(ranks: list[HostedStore]) -> None:
    lose(ranks[0])
    with pytest.raises(PgasTimeoutError, match=r"rank 2: no store"):
        ranks[2].go_on_without({0}, 0.3, look)
    noticed = threading.Event()

    def lost_too() -> None:
        if noticed.is_set():
            raise PeerLostError("rank 1 died", 1)
        noticed.set()

    with pytest.raises(PeerLostError, match="rank 1 died"):
        ranks[2].go_on_without({0}, 60.0, lost_too)
    ranks[2].go_on_without({0, 1}, 10.0, look)
    ranks[2].put("alone", b"1")
