"""Two hosts of two ranks: what is node-aware, where there are nodes; the tuner between them."""

from __future__ import annotations

from pathlib import Path

import hosts
import pytest
from hosts import Job

from pgasdl.collectives.policy import Policy

pytestmark = pytest.mark.full

NODES = "verbs/programs/nodes.py"
QUIET = {"PGASDL_LOG": "warning"}
FOUR = [[0, 1], [2, 3]]


@pytest.mark.parametrize("ranks", [FOUR, [[0, 2], [1, 3]]], ids=["neighbours", "interleaved"])
def test_exchanges_inside_and_across(tmp_path: Path, ranks: list[list[int]]) -> None:
    """Every plan is exact, and loads inside a node, whatever the ranks' numbers are."""
    job = Job("nodes", NODES, ranks, ["exchange"], QUIET, seconds=200)
    story = hosts.run(tmp_path, [job])["nodes"].check(4)
    for host in ranks:
        for rank in host:
            others = [other for other in range(4) if other not in host]
            routes = f"shm to ranks {host}, verbs to ranks {others} (shm inside a machine)"
            said = story.of(rank)
            assert said[0] == f"transport {routes}"
            assert said[1].startswith("checked ") and said[1].endswith(" exchanges")
            assert said[2:] == [
                "loads inside a node, messages between nodes",
                "checked groups inside and across",
                "gdraa-direct is refused",
                "complete",
            ], str(story)


def test_a_policy_is_tuned_and_used(tmp_path: Path) -> None:
    """Both classes of pairs are measured; the policy is the same on all ranks, and is used."""
    file = tmp_path / "policy"
    by_hand = (
        "allreduce:0-1k:gdraa-nodes#1k-8k:chain-binomial(chain_size=2)"
        "#8k-inf:halving-doubling(group_size=2)"
    )
    jobs = [
        Job("tune", NODES, FOUR, ["tune", str(file)], QUIET, seconds=200),
        Job("use", NODES, FOUR, ["policy"], QUIET | {"PGASDL_POLICY": f"@{file}"}),
        Job("hand", NODES, FOUR, ["policy"], QUIET | {"PGASDL_POLICY": by_hand}),
    ]
    stories = hosts.run(tmp_path, jobs)
    for story in stories.values():
        story.check(4)
    story = stories["tune"]
    measured = [line for line in story.of(0) if line.startswith("measured ")]
    assert [line.split(":")[0] for line in measured] == [
        "measured   inside nodes (2 ranks)",
        "measured   across nodes (2 ranks)",
    ]
    tuned = {line for rank in range(4) for line in story.of(rank) if line.startswith("tuned ")}
    policy = Policy.parse(file.read_text())
    assert tuned == {f"tuned {policy}"}, str(story)
    remarks = file.read_text()
    assert "shm to ranks [0, 1], verbs to ranks [2, 3]" in remarks and '"per_node": 2' in remarks
    (considered,) = [line for line in story.of(0) if line.startswith("considers ")]
    assert " gdraa-nodes " in considered, considered
    for name, of in (("use", policy), ("hand", Policy.parse(by_hand))):
        for rank in range(4):
            assert stories[name].of(rank)[1:-1] == [
                f"{n} bytes by {of.find('allreduce', n)}" for n in (64, 4096, 100_000)
            ]
