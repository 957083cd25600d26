"""Which transport reaches which rank, and what the error says when none can."""

from __future__ import annotations

import pytest

from pgasdl import _native
from pgasdl.errors import MismatchError, UnavailableError
from pgasdl.runtime.routes import RankInfo, decide, require_one_selection
from pgasdl.topology import by_machine, node_size
from pgasdl.transports import TRANSPORTS


def info(host: str = "a", asked: str = "auto", no_verbs: str = "", mpi: bool = False) -> RankInfo:
    missing = {"verbs": no_verbs, "mpi": "" if mpi else "no communicator"}
    return RankInfo(host, asked, False, {name: why for name, why in missing.items() if why})


def test_one_machine_needs_no_rdma() -> None:
    routes = decide(1, [info(no_verbs="no device")] * 3)
    assert routes.names == ("shm",) * 3
    assert str(routes) == "shm to all ranks (all on this machine; no RDMA needed)"
    assert str(decide(0, [info()])) == "shm to all ranks (the only one)"


def test_machines_are_joined_by_verbs() -> None:
    ranks = [info("a"), info("a"), info("b"), info("b")]
    assert decide(0, ranks).names == ("shm", "shm", "verbs", "verbs")
    assert decide(3, ranks).names == ("verbs", "verbs", "shm", "shm")
    assert str(decide(1, ranks)) == (
        "shm to ranks [0, 1], verbs to ranks [2, 3] (shm inside a machine)"
    )


def test_machines_without_verbs_are_joined_by_mpi_if_all_ranks_came_through_it() -> None:
    ranks = [info("a", mpi=True), info("b", no_verbs="no device", mpi=True)]
    assert str(decide(0, ranks)) == (
        "mpi to all ranks (several machines, joined through MPI; rank 1 has no verbs: no device)"
    )
    assert str(decide(0, [info("a"), ranks[1]])) == (
        "shm to ranks [0], tcp to ranks [1] (shm inside a machine; rank 1 has no verbs: no device; "
        "rank 0 has no mpi: no communicator)"
    )


def test_what_is_asked_for_is_used_everywhere() -> None:
    assert decide(0, [info(asked="verbs")] * 2).names == ("verbs", "verbs")
    assert decide(0, [info(asked="shm", no_verbs="no")] * 2).names == ("shm", "shm")


def test_refusals_name_rank_and_reason() -> None:
    with pytest.raises(MismatchError, match='rank 0 asks for transport "shm", rank 1 for "verbs"'):
        decide(0, [info(asked="shm"), info(asked="verbs")])
    with pytest.raises(UnavailableError, match=r"memory of ranks \[1\].*other machines"):
        decide(0, [info("a", "shm"), info("b", "shm")])
    with pytest.raises(UnavailableError, match=r"asked for.*on rank 1: no device; .*doctor"):
        decide(0, [info(asked="verbs"), info(asked="verbs", no_verbs="no device")])


@pytest.mark.parametrize(
    ("hosts", "size"),
    [
        *(("A", 1), ("AAA", 3), ("AABB", 2), ("AABBC", 2), ("ABC", 1), ("AABBBB", (2, 4))),
        *(("AAABBC", (3, 2, 1)), ("ABB", (1, 2)), ("ABBCC", (1, 2, 2))),
    ],
)
def test_nodes_are_as_large_as_the_first_but_for_the_last_or_each_has_its_size(
    hosts: str, size: int | tuple[int, ...]
) -> None:
    assert node_size(hosts) == size


@pytest.mark.parametrize(
    ("hosts", "found"),
    [("AB", "AB"), ("ABAB", "AABB"), ("ABCABCA", "AAABBCC"), ("BAAB", "BBAA"), ("", "")],
)
def test_places_of_a_machine_become_neighbours(hosts: str, found: str) -> None:
    order = by_machine(hosts)
    assert "".join(hosts[place] for place in order) == ("" if hosts == found else found)


def test_what_ranks_tell_travels_as_words() -> None:
    here = RankInfo("boot 1 2", "auto", True, {"verbs": "no libibverbs.so.1"}, "")
    assert RankInfo.decoded(here.encoded()) == here


def test_the_settings_name_the_rows_of_the_native_table() -> None:
    assert list(_native.transports()) == list(TRANSPORTS)


def test_ranks_with_different_supernodes_are_told() -> None:
    ranks = [RankInfo("a", "auto", False, {}, supernode=size) for size in (4, 4, 8)]
    with pytest.raises(MismatchError, match=r"rank 0 has supernodes of 4 ranks, rank 2 of 8"):
        require_one_selection(0, ranks)
    assert RankInfo.decoded(ranks[2].encoded()) == ranks[2]
