"""The training app over verbs, between two hosts, and torch.distributed's backend."""

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

APP = "../apps/train_digits.py"
SHORT = ["--epochs", "1", "--batch", "120", "--picture", "", "--check-bits", "--save"]


def test_weights_of_shm_and_a_process_group(tmp_path: Path) -> None:
    """Two ranks on two hosts: in one job all average, in the other the owner of a block updates."""
    folder = tmp_path / "guests"
    folder.mkdir()
    kinds = ("average", "update")
    over_verbs = [
        Job(kind, APP, [[0], [1]], [*SHORT, str(folder / f"{kind}.npz"), "--kind", kind],
            {"PGASDL_TIMEOUT": "100"}, seconds=150)
        for kind in kinds
    ]  # fmt: skip
    group = Job("group", "training/programs/process_group.py", [[0], [1]], torchrun=True,
                env={"PGASDL_TIMEOUT": "100"}, seconds=150)  # fmt: skip
    groups = Job("groups", "training/programs/many_groups.py", [[0], [1]], ["60"], torchrun=True,
                 env={"PGASDL_TIMEOUT": "100"}, seconds=150)  # fmt: skip
    stories = hosts.run(folder, [*over_verbs, group, groups])
    story = stories["group"].check(2)
    assert "rank 0 over verbs" in story.of(0) and "rank 1 over verbs" in story.of(1), str(story)
    story = stories["groups"].check(2)
    assert all("left nothing" in story.of(rank)[-1] for rank in range(2)), str(story)
    for kind in kinds:
        story = stories[kind].check(2)
        assert any("verbs to ranks [1]" in line for line in story.of(0)), str(story)
        assert any("the same bits on 2 ranks" in line for line in story.of(0)), str(story)
        file = tmp_path / f"{kind}.npz"
        jobs.run(2, APPS / "train_digits.py", *SHORT, str(file), "--kind", kind)
        with np.load(file) as wanted, np.load(folder / file.name) as found:
            assert list(found) == list(wanted) == ["conv1", "conv2", "conv3", "linear1", "linear2"]
            for name in wanted:
                assert found[name].tobytes() == wanted[name].tobytes(), name
