"""NUMA nodes, as a kernel of two of them would tell, and the ranks' turns at what lies there."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from pgasdl import numa
from pgasdl.runtime.routes import RankInfo, topology_of
from pgasdl.tools import nodes
from pgasdl.tools.rdma import RdmaAddress
from pgasdl.topology import Launch


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nodes 0 and 2; this process runs on the second."""
    for node, processors, distances in ((0, "0-1,4", "10 21"), (2, "2-3", "21 10")):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "cpulist").write_text(f"{processors}\n")
        (folder / "distance").write_text(f"{distances}\n")
    monkeypatch.setattr(numa, "NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    return tmp_path


def test_nodes_of_this_process(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert numa.processors() == {0: "0-1,4", 2: "2-3"}
    assert (numa.own_nodes(), numa.distances()) == ([2], [21, 255, 10])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 4})
    assert (numa.own_nodes(), numa.distances()) == ([0, 2], [10, 255, 10])
    (kernel / "node0/cpulist").write_text("\n")  # memory alone
    assert numa.own_nodes() == [2]


def test_a_sandbox_that_shows_a_part(kernel: Path) -> None:
    (kernel / "node2/distance").unlink()
    assert (numa.own_nodes(), numa.distances()) == ([2], [])
    (kernel / "node2/cpulist").unlink()
    assert numa.processors() == {0: "0-1,4"}
    assert (numa.own_nodes(), numa.distances()) == ([], [])


def test_a_kernel_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "NODES", tmp_path / "none")
    assert (numa.processors(), numa.own_nodes(), numa.distances()) == ({}, [], [])


def test_the_drawing(kernel: Path) -> None:
    """Two ports nearby are used by turns, one far away is not, and one is at no known node."""

    def port(name: str, node: int, turn: int) -> RdmaAddress:
        return RdmaAddress(name, 1, numa_node=node, chosen=turn == 0, turn=turn)

    ports = [port("d", 2, 0), port("c", 2, 1), port("b", 0, -1), port("a", -1, -1)]
    assert [*nodes.report(nodes.survey(ports, []))] == [
        "NUMA node 0: CPUs 0-1,4, distance 21",
        "  b:1",
        "NUMA node 2: CPUs 2-3, of this process",
        "  c:1  ranks 1, 3 ...",
        "  d:1  ranks 0, 2 ...",
        "at no known NUMA node",
        "  a:1",
    ]
    rails = [dataclasses.replace(each, chosen=each.turn >= 0) for each in ports]
    lines = [*nodes.report(nodes.survey(rails, []))]
    assert lines[3:5] == ["  c:1  the first rank", "  d:1  the first rank"]
    assert [*nodes.report(nodes.survey(ports[:1], []))][-1] == "  d:1  every rank"
    assert [*nodes.report(nodes.survey([], []))] == [lines[0], lines[2]]


def test_turns_are_counted_by_machine_and_nodes() -> None:
    places = ["a0", "a1", "a0", "b0", "a1", "b0", "b01"]
    ranks = [RankInfo(place[0], "verbs", False, {}, nodes=",".join(place[1:])) for place in places]
    turns = [
        topology_of(
            Launch("pgasdl", rank, len(ranks), 0, 1, "job"), ranks, mapped=True, near=frozenset()
        ).turn
        for rank in range(len(ranks))
    ]
    assert turns == [0, 0, 1, 0, 1, 1, 0]
