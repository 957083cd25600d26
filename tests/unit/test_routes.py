"""Which transport goes where, and what is said when none can."""

from __future__ import annotations

import pytest

from pgasdl.errors import MismatchError, UnavailableError
from pgasdl.routes import Place, choose, node_size


def place(host: str = "a", asked: str = "auto", no_verbs: str = "") -> Place:
    return Place(host, asked, False, no_verbs, "")


def test_one_machine_needs_no_rdma() -> None:
    routes = choose(1, [place(no_verbs="no device")] * 3)
    assert routes.names == ("shm",) * 3
    assert str(routes) == "shm to all ranks (all on this machine; no RDMA needed)"
    assert str(choose(0, [place()])) == "shm to all ranks (the only one)"


def test_machines_are_joined_by_verbs() -> None:
    places = [place("a"), place("a"), place("b"), place("b")]
    assert choose(0, places).names == ("shm", "shm", "verbs", "verbs")
    assert choose(3, places).names == ("verbs", "verbs", "shm", "shm")
    assert str(choose(1, places)) == (
        "shm to ranks [0, 1], verbs to ranks [2, 3] (shm inside a machine)"
    )


def test_what_is_asked_for_is_used_everywhere() -> None:
    assert choose(0, [place(asked="verbs")] * 2).names == ("verbs", "verbs")
    assert choose(0, [place(asked="shm", no_verbs="no")] * 2).names == ("shm", "shm")


def test_refusals_name_rank_and_reason() -> None:
    with pytest.raises(MismatchError, match='rank 0 asks for transport "shm", rank 1 for "verbs"'):
        choose(0, [place(asked="shm"), place(asked="verbs")])
    with pytest.raises(UnavailableError, match=r"memory of ranks \[1\].*other machines"):
        choose(0, [place("a", "shm"), place("b", "shm")])
    with pytest.raises(UnavailableError, match=r"asked for.*on rank 1: no device; .*doctor"):
        choose(0, [place(asked="verbs"), place(asked="verbs", no_verbs="no device")])
    with pytest.raises(UnavailableError, match=r"several machines.*on rank 0: old build"):
        choose(1, [place("a", no_verbs="old build"), place("b")])


@pytest.mark.parametrize(
    ("hosts", "size"),
    [("A", 1), ("AAA", 3), ("AABB", 2), ("AABBC", 2), ("AABBBB", 2), ("AAABBC", 1), ("ABAB", 1)],
)
def test_a_node_is_as_large_as_the_first_if_all_are_regular(hosts: str, size: int) -> None:
    assert node_size(hosts) == size


def test_places_travel_as_words() -> None:
    here = Place("boot 1 2", "auto", True, "no libibverbs.so.1", "")
    assert Place.decoded(here.encoded()) == here
