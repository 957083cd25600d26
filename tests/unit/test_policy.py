"""Policies as text: what is accepted, what is printed, what is refused and how."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgasdl.collectives.policy import Choice, Policy, Rule, load
from pgasdl.config import Config
from pgasdl.errors import ConfigError
from pgasdl.plans import PLANS


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("allreduce:0-64k:tree#64k-inf:gdraa", "allreduce:0-64k:tree#64k-inf:gdraa"),
        (" allreduce : 0-1024 : tree ", "allreduce:0-1k:tree"),
        ("broadcast:0-inf:tree;allreduce:1m-1g:ring", "allreduce:1m-1g:ring;broadcast:0-inf:tree"),
        ("allreduce:0-inf:chain(chunks=8,root=1)", "allreduce:0-inf:chain(chunks=8,root=1)"),
        ("# mine\nallreduce:0-1:tree\n\nreduce:0-9:chain", "allreduce:0-1:tree;reduce:0-9:chain"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_policy_is_printed_as_it_is_read(text: str, printed: str) -> None:
    assert str(Policy.parse(text)) == printed
    assert Policy.parse(printed) == Policy.parse(text)


def test_what_is_chosen() -> None:
    policy = Policy.parse("allreduce:8-64k:tree#64k-1m:chain(chunks=4)#2m-inf:gdraa")
    sizes = (0, 8, 65535, 65536, (1 << 20) - 1, 1 << 20, 2 << 20, 1 << 40)
    found = [policy.find("allreduce", size) for size in sizes]
    tree, chain, gdraa = Choice("tree"), Choice("chain", (("chunks", 4),)), Choice("gdraa")
    assert found == [None, tree, tree, chain, chain, None, gdraa, gdraa]
    assert policy.find("broadcast", 8) is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("allreduce", "''"),
        ("allgather:0-1:ring", "no operation 'allgather'"),
        ("allreduce:0-64k:treee", "no plan named 'treee'; there are"),
        ("allreduce:64k-0:tree", "no size is in 64k-0"),
        ("allreduce:0-64k:tree#32k-inf:gdraa", "begins before 0-64k:tree ends"),
        ("allreduce:0-1:tree;allreduce:1-2:tree", "comes twice"),
        ("allreduce:0-1:tree(depth=3)", "no option 'depth'"),
        ("allreduce:0-1:tree(root)", "'root' is no option"),
        ("broadcast:0-inf:gdraa", "plan gdraa is no broadcast; these are"),
        ("allreduce:0-inf:multi-stage", "is no allreduce"),
        ("allreduce:-1-5:tree", "is no LOW-HIGH:PLAN"),
        ("allreduce:0-1T:tree", "is no LOW-HIGH:PLAN"),
        ("x" * (2 << 20), "at most 1048576"),
    ],
)
def test_a_policy_is_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Policy.parse(text)
    assert named in str(caught.value)


@given(st.text(alphabet="alreduc:0-64k:tgh#;(=),inf\n ", max_size=60))
def test_any_text_is_a_policy_or_an_error(text: str) -> None:
    try:
        policy = Policy.parse(text)
    except ConfigError:
        return
    assert Policy.parse(str(policy)) == policy


@given(
    st.lists(st.integers(0, 1 << 40), min_size=2, max_size=8, unique=True),
    st.lists(
        st.sampled_from(["tree", "gdraa", "ring", "halving-doubling"]), min_size=8, max_size=8
    ),
)
def test_any_policy_survives_printing(edges: list[int], plans: list[str]) -> None:
    edges.sort()
    bounds = [*edges[1:], math.inf]
    rules = tuple(
        Rule(low, high, Choice(plan))
        for low, high, plan in zip(edges, bounds, plans[: len(edges)], strict=True)
    )
    policy = Policy((("allreduce", rules),))
    assert Policy.parse(str(policy)) == policy
    assert all(rule.choice.plan in PLANS for rule in rules)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "policy"
    path.write_text("# of this machine\nallreduce:0-inf:ring\n")
    assert str(load(f"@{path}")) == "allreduce:0-inf:ring"
    path.write_text("allreduce:nonsense")
    with pytest.raises(ConfigError, match=rf"policy file {path}: policy: allreduce"):
        load(f"@{path}")
    with pytest.raises(ConfigError, match="No such file"):
        load("@/no/such/file")


def test_the_variable_is_checked_when_it_is_read() -> None:
    config = Config.from_environment({"PGASDL_POLICY": "allreduce:0-64k:tree"})
    assert config.policy == "allreduce:0-64k:tree"
    with pytest.raises(ConfigError, match="PGASDL_POLICY"):
        Config.from_environment({"PGASDL_POLICY": "x" * (1 << 21)})
