"""Two hosts on a cable: shm inside a host, verbs between hosts, exact whatever packets are lost."""

from __future__ import annotations

from pathlib import Path

import hosts
import pytest
from hosts import Job, Story

pytestmark = pytest.mark.full

PARTS = ("writes_and_notifications", "lists", "atomics", "reductions", "messages")
EXACT = "verbs/programs/exact.py"


def assert_exact(story: Story, size: int) -> None:
    story.check(size)
    for rank in range(size):
        said = story.of(rank)
        assert [line for line in said if line.endswith("are exact")] == [
            f"{part} are exact" for part in PARTS
        ]
        assert said[-1] == "complete"


def assert_route(story: Story, rank: int, words: str) -> None:
    """A rank logs these words about its routes at init."""
    assert any(line.startswith("pgasdl: rank") and words in line for line in story.of(rank)), (
        f"no {words!r}\n{story}"
    )


@pytest.mark.parametrize("loss", [0, 0.1, 1, 5])
def test_exact_with_loss(tmp_path: Path, loss: float) -> None:
    """No setting names a transport, and between the hosts it is verbs."""
    job = Job("two", EXACT, [[0], [1]], ["0/1"], seconds=100)
    story = hosts.run(tmp_path, [job], loss=loss)["two"]
    assert_exact(story, 2)
    assert_route(story, 0, "shm to ranks [0], verbs to ranks [1] (shm inside a machine)")
    assert_route(story, 1, "shm to ranks [1], verbs to ranks [0] (shm inside a machine)")


def test_mixed_routes(tmp_path: Path) -> None:
    """Two ranks per host, started by torchrun's variables; then all of them forced onto verbs."""
    four = [[0, 1], [2, 3]]
    forced = {"PGASDL_TRANSPORT": "verbs"}
    stories = hosts.run(
        tmp_path,
        [
            Job("mixed", EXACT, four, ["01/23"], torchrun=True),
            Job("forced", EXACT, four, ["01/23", "verbs"], forced),
        ],
        loss=0.1,
    )
    assert_exact(stories["mixed"], 4)
    assert_route(stories["mixed"], 0, "shm to ranks [0, 1], verbs to ranks [2, 3]")
    assert_route(stories["mixed"], 3, "shm to ranks [2, 3], verbs to ranks [0, 1]")
    assert_exact(stories["forced"], 4)
    assert_route(stories["forced"], 2, "verbs to all ranks (asked for)")


def test_tcp_over_a_bad_network(tmp_path: Path) -> None:
    """Packets are late, overtake each other, and some are lost."""
    netem = ["delay", "25ms", "5ms", "reorder", "25%", "50%", "loss", "1%"]
    env = {"PGASDL_TRANSPORT": "tcp", "PGASDL_STOPPED_AFTER": "15"}
    job = Job("bad", EXACT, [[0], [1]], ["0/1", "tcp", *netem], env, seconds=200)
    story = hosts.run(tmp_path, [job])["bad"]
    assert_exact(story, 2)
    assert_route(story, 0, "tcp to all ranks (asked for)")


def test_patience(tmp_path: Path) -> None:
    """A host that stands still for less than PGASDL_STOPPED_AFTER is not lost."""
    job = Job("patience", "verbs/programs/patient.py", [[0], [1]], ["20"], harm=("pause", 1))
    job.env = {"PGASDL_STOPPED_AFTER": "60"}
    story = hosts.run(tmp_path, [job])["patience"].check(2)
    # The clock of a host that stands still may stand still, too.
    assert story.event("longest", 0)["seconds"] > hosts.PAUSE / 2, str(story)
