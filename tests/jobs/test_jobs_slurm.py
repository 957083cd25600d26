"""``pgasdl serve --slurm``, and jobs for which a server has no Slurm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs_harness import Server
from support import slurm, two_hosts
from support.places import ROOT

from pgasdl import JobError

INSIDE = Path(__file__).with_name("inside_slurm.py")


@pytest.mark.full
@pytest.mark.parametrize("name", re.findall(r"(?m)^def test_(\w+)", INSIDE.read_text()))
def test_a_real_slurm(tmp_path: Path, name: str) -> None:
    two_hosts.require()
    slurm.require()
    start = slurm.start({"node1": "198.18.0.1", "node2": "198.18.0.2"}, ["node1"])
    test = f"pytest -q -p no:cacheprovider --basetemp={tmp_path}/tests {INSIDE}::test_{name}"
    # The options of this pytest are not for that one.
    told = two_hosts.succeeded(tmp_path, f"{start}\ncd {ROOT} && env -u PYTEST_ADDOPTS {test}")
    assert "1 passed" in told


def test_resources_are_slurms(server: Server) -> None:
    with pytest.raises(JobError, match="--slurm") as refused:
        server.submit(resources={"nodes": "2"})
    assert refused.value.field == "resources.nodes"
    with pytest.raises(JobError, match="none of account, constraint"):
        server.submit(resources={"wrap": "true"})
