"""Ranks on any hosts, in any order: between hosts no byte goes more often than it must."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import full

from pgasdl.collectives.bound import automatic
from pgasdl.collectives.policy import Choice, Policy
from pgasdl.errors import ConfigError, PlanError
from pgasdl.plans import PLANS, Case, Members, Plan, Put, build, build_all
from pgasdl.plans.algorithms.gdraa_nodes import SPEC
from pgasdl.plans.check import assert_ok, check
from pgasdl.plans.cost import Model, Pair, predict
from pgasdl.plans.pieces import build_array
from pgasdl.plans.plan import ROOTED, lengths
from pgasdl.topology import by_machine, node_size

KINDS = ("sum", "reduce", "broadcast", "reduce-scatter", "all-gather")
# A letter is the host of a rank. Unlike numbers of ranks, as after a loss; and interleaved.
HOSTS = (
    *("AAB", "ABB", "AABBB", "BBBAA", "AABBBB", "BBBBAA", "AAABBBBB", "BBBBBAAA", "ABBBBBBB"),
    *("BBBBBBBA", "AAAABBBBBBBB", "BBBBBBBBAAAA", "AAAAAAABBBBBBBB", "BBBBBBBBAAAAAAA"),
    *("AAAAAAABBBBBBBBCCCCCCCC", "CCCCCCCCBBBBBBBBAAAAAAA", "AABBBCCCC"),
    *("ABABB", "ABBAB", "ABCABCA", "AABBBCCBA", "BCAABCBBB", "ABCDEABCD", "ABCDDDDD"),
)


def members_of(hosts: str, *, loads: bool = True) -> Members:
    order = by_machine(hosts)
    sizes = node_size([hosts[rank] for rank in order] or hosts)
    return Members(len(hosts), sizes, mapped_on_node=loads, registers=True, order=order)


def chosen(
    hosts: str, kind: str, count: int, root: int = 0, *, loads: bool = True, wire: bool = False
) -> list[Plan]:
    """Build what is taken where nobody names a plan, as handles and exchanges build it."""
    members = members_of(hosts, loads=loads)
    case = Case(members, kind, 4 * count, in_segments=True, wire=wire)
    choice = automatic(case, phases=False)
    options = PLANS[choice.plan].options_of(members, 32768) | dict(choice.options)
    if kind in ROOTED:
        options["root"] = root
    return [
        build_array(choice.plan, rank, members, (count,), kind=kind, wire=wire, **options).first
        for rank in range(len(hosts))
    ]


def across(plans: list[Plan], hosts: str) -> list[int]:
    """Return the elements that each rank puts to other hosts."""
    return [
        sum(
            step.n
            for *_, step in plan.steps()
            if isinstance(step, Put) and hosts[step.peer] != hosts[plan.rank]
        )
        for plan in plans
    ]


def fewest(hosts: str, kind: str, count: int) -> int:
    """Return the elements that have to go between N hosts.

    Each element of a sum takes a contribution from every host: N - 1 hops to wherever it is made,
    be it the root, or the owner of a block, however long blocks are. Each element that is spread
    has to enter N - 1 hosts. An exchange does both.
    """
    return (2 if kind == "sum" else 1) * (len(set(hosts)) - 1) * count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hosts", HOSTS)
def test_between_any_hosts_each_element_goes_once(hosts: str, kind: str) -> None:
    for count in (1, 5000):
        for root in range(len(hosts)) if kind in ROOTED else (0,):
            plans = chosen(hosts, kind, count, root)
            assert sum(across(plans, hosts)) == fewest(hosts, kind, count), (count, root)


def partitions(size: int) -> Iterator[str]:
    """Every way to put ranks on at least two hosts, but for the hosts' names."""
    found = ["A"]
    for _ in range(size - 1):
        found = [hosts + host for hosts in found for host in "ABCDEF"[: len(set(hosts)) + 1]]
    return (hosts for hosts in found if len(set(hosts)) > 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", full([2, 3, 4, 5, 6], quick=3))
def test_every_distribution_is_proved(size: int, kind: str) -> None:
    for hosts in partitions(size):
        for loads in (False, True):
            root = size - 1 if kind in ROOTED else 0
            plans = chosen(hosts, kind, 100, root, loads=loads)
            assert check(plans, kind=kind, root=root) == [], (hosts, loads)
            assert sum(across(plans, hosts)) == fewest(hosts, kind, 100), (hosts, loads)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.text("ABCDE", min_size=2, max_size=12), st.sampled_from(KINDS))
def test_any_hosts_are_proved(data: st.DataObject, hosts: str, kind: str) -> None:
    count = data.draw(st.integers(1, 2000))
    root = data.draw(st.integers(0, len(hosts) - 1)) if kind in ROOTED else 0
    loads = data.draw(st.booleans())
    wire = kind == "sum" and data.draw(st.booleans())
    plans = chosen(hosts, kind, count, root, loads=loads, wire=wire)
    assert check(plans, kind=kind, root=root, seeds=1) == []
    assert sum(across(plans, hosts)) == fewest(hosts, kind, count)


@pytest.mark.parametrize("hosts", HOSTS)
def test_no_rank_sends_more_than_those_of_the_smallest_host(hosts: str) -> None:
    """Its share of a sum is the least that any division of that host's part can give it."""
    count = 16 * 5040
    n_hosts, smallest = len(set(hosts)), min(hosts.count(host) for host in hosts)
    share = 2 * (n_hosts - 1) * count // n_hosts // smallest
    rounding = 2 * 16 * n_hosts * len(hosts)
    assert max(across(chosen(hosts, "sum", count), hosts)) <= share + rounding


def test_one_large_host_among_many_takes_no_more_messages_than_gdraa() -> None:
    sizes = (8, *[1] * 256)
    for rank in (0, 7, 8, 263):
        plan = build("gdraa-nodes", rank, 264, 5000, kind="sum", group_size=sizes)
        assert plan.notifications <= 4 * 264
        assert sum(isinstance(step, Put) for *_, step in plan.steps()) <= 2 * 263


@pytest.mark.parametrize("sizes", [(2, 5), (3, 1, 2), (1, 1, 4)], ids=str)
def test_trees_of_unlike_groups_are_proved_from_any_root(sizes: tuple[int, ...]) -> None:
    size = sum(sizes)
    for plan, option in (("tree", "group_size"), ("chain-chain", "chain_size")):
        for root in range(size):
            for kind in (*ROOTED, "update"):
                assert_ok(plan, size, 100, kind=kind, root=root, chunks=2, **{option: sizes})


def test_sizes_are_taken_in_turn() -> None:
    assert lengths(7, 3) == (3, 3, 1) and lengths(9, (2, 4)) == (2, 4, 2, 1)
    alike = build_all("gdraa-nodes", 8, 100, group_size=(4, 4))
    assert alike == build_all("gdraa-nodes", 8, 100, group_size=4)


def test_a_policy_names_unlike_groups() -> None:
    text = "allreduce:0-4k:tree(group_size=7+8+8)#4k-inf:gdraa-nodes(direct=0,group_size=7+8+8)"
    policy = Policy.parse(text)
    assert str(policy) == text
    assert policy.find("allreduce", 0) == Choice("tree", (("group_size", (7, 8, 8)),))
    for wrong, why in (
        ("tree(chunks=2+3)", "an integer is needed"),
        ("tree(group_size=2+0)", "group_size is 0"),
        ("gdraa-nodes(group_size=2+)", "is no option"),
    ):
        with pytest.raises(ConfigError, match=why):
            Policy.parse(f"allreduce:0-inf:{wrong}")


def test_an_order_names_each_rank_once() -> None:
    for order in ((0, 1), (0, 1, 1), (1, 2, 3)):
        with pytest.raises(PlanError, match="order"):
            SPEC.build(0, 3, 8, kind="all-gather", group_size=(2, 1), order=order)


@pytest.mark.parametrize("kind", ["sum", "reduce-scatter", "all-gather"])
@pytest.mark.parametrize("sizes", [(7, 8), (7, 8, 8), (2, 3, 4), (1, 8)], ids=str)
def test_between_unlike_hosts_gdraa_is_predicted_to_be_slower(
    sizes: tuple[int, ...], kind: str
) -> None:
    """Where a rank sends to others of its host five times as fast."""
    near, far = Pair(5e-7, 2e-11, 3e-7), Pair(1.5e-6, 1e-10, 3e-7)
    model, size = Model(near, far, per_node=sizes, gamma=2e-11), sum(sizes)
    for count in (1 << 16, 1 << 20):
        seconds = [
            predict(build_all(name, size, count, kind=kind, **options), model)
            for name, options in (("gdraa-nodes", {"group_size": sizes}), ("gdraa", {}))
        ]
        assert seconds[0] < seconds[1]
