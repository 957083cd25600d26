"""Two devices for two ranks: both carry, and one of them is taken away in mid-training."""

from __future__ import annotations

from pathlib import Path

import hosts
import jobs
import numpy as np
import pytest
from hosts import Job
from support.places import APPS
from support.requiring import require_modules

pytestmark = pytest.mark.full

require_modules("torch", "sklearn")

PROGRAM = "verbs/programs/rails.py"
BOTH = [[0, 1]]
RAILS = {
    "PGASDL_TRANSPORT": "verbs",
    "PGASDL_VERBS_RAILS": "2",
    "PGASDL_VERBS_STRIPE": "4096",
    "PGASDL_TIMEOUT": "100",
}
SHORT = ["--epochs", "1", "--batch", "120", "--picture", "", "--check-bits", "--save"]


def test_both_carry_and_one_is_lost(tmp_path: Path) -> None:
    """The weights have the bits of a training over shared memory, though a device was lost."""
    folder = tmp_path / "guest"
    folder.mkdir()
    stories = hosts.run(
        folder,
        [
            Job("exact", PROGRAM, BOTH, ["exact"], RAILS),
            Job("lose", PROGRAM, BOTH, ["lose"], RAILS, seconds=90),
            Job("train", PROGRAM, BOTH, ["train", *SHORT, str(folder / "w.npz")], RAILS,
                seconds=200),
        ],
        mode="rails",
    )  # fmt: skip
    stories["exact"].check(2)
    story = stories["lose"].check(2)
    for rank in range(2):
        line = f"pgasdl: rank {rank}: the rail by rxe0:1 to rank {1 - rank} is dropped: "
        assert any(said.startswith(line) for said in story.of(rank)), str(story)
    story = stories["train"].check(2)
    assert any("the same bits on 2 ranks" in line for line in story.of(0)), str(story)
    assert any("rxe1:1 to rank 1 is dropped" in line for line in story.of(0)), str(story)
    assert story.of(0)[-1] == "trained on without rxe1", str(story)
    file = tmp_path / "w.npz"
    jobs.run(2, APPS / "train_digits.py", *SHORT, str(file))
    with np.load(file) as wanted, np.load(folder / "w.npz") as found:
        assert list(found) == list(wanted) == ["conv1", "conv2", "conv3", "linear1", "linear2"]
        for name in wanted:
            assert found[name].tobytes() == wanted[name].tobytes(), name
