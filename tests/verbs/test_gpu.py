"""Arrays on a GPU over verbs, by way of the host and by the adapter; the driver is a fake one."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import hosts
import pytest
import rig
from hosts import Job
from support import fake_driver
from support.places import INSTALLED, TESTS

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]  # guests are slow

PROGRAMS = TESTS / "gpu" / "programs"
ROOM = 6 << 30  # bytes: what is registered is there, page by page
QUIET = {"PGASDL_LOG": "warning"}
PARTS = ["allreduces", "handles", "exchanges"]


def told(*program: object, before: str = "", adapter: bool = False, **fake: object) -> str:
    """The output of ranks in a guest, whose adapter may reach the GPU's memory.

    ``before`` : commands of a shell
    """
    ranks = [sys.executable, "-P", "-m", "pgasdl", "run", "-n", "2", "--no-prefix", *program]
    environ = fake_driver.variables(adapter=adapter, **fake) | {
        "PYTHONPATH": f"{INSTALLED}:{TESTS}",
        "PGASDL_TRANSPORT": "verbs",
        "PGASDL_GPU_PIECE": "768",
        "PGASDL_TIMEOUT": "120",
    }
    command = before + shlex.join(map(str, ranks))
    return rig.run(command, env=environ, memory=ROOM, timeout=300).check().output


def test_collectives_by_the_host() -> None:
    parts = ["staged", *PARTS]
    assert json.dumps(parts) in told(PROGRAMS / "collectives.py", "0", *parts)


def test_collectives_by_the_adapter() -> None:
    parts = [*PARTS, "long_arrays"]
    assert json.dumps(parts) in told(PROGRAMS / "collectives.py", "0", *parts, adapter=True)


def test_collectives_of_two_nodes(tmp_path: Path) -> None:
    """Between two nodes the adapter carries what the nodes' ranks map inside."""
    fake = fake_driver.variables(adapter=True)
    program = "gpu/programs/collectives.py"
    parts = ["handles", "exchanges"]
    job = Job("gpu", program, [[0, 1], [2, 3]], ["0", *parts], QUIET, seconds=250)
    story = hosts.run(tmp_path, [job], memory=ROOM, env=fake)["gpu"].check(4)
    assert story.of(0) == [json.dumps(parts)], str(story)


FLUSHED = {"lacks": "writes-ordering"}


# As if the kernel had it.
PEERMEM = "mount -t tmpfs none /sys/module && mkdir /sys/module/nvidia_peermem && "


@pytest.mark.parametrize("fake", [{}, FLUSHED], ids=["ordered", "flushed"])
def test_one_sided_by_the_adapter(fake: dict[str, str]) -> None:
    assert "right" in told(PROGRAMS / "adapter.py", adapter=True, **fake)


def test_one_sided_by_addresses() -> None:
    """nvidia-peermem, where the GPU's driver makes no descriptors."""
    assert "right" in told(PROGRAMS / "adapter.py", before=PEERMEM, adapter=True, lacks="dmabuf")


def test_adapters_writes_are_flushed_where_the_gpu_needs_it() -> None:
    fails = {"fail": "flush_gpu_direct_rdma_writes:2"}
    with pytest.raises(AssertionError, match="letting GPU 0 see what an adapter has written"):
        told(PROGRAMS / "adapter.py", adapter=True, **FLUSHED, **fails)


@pytest.mark.parametrize(
    ("lacks", "why"),
    [
        ("dmabuf", "have neither dmabuf"),
        ("rdma-with-vmm", "lacks RDMA to shareable allocations"),
        ("writes-ordering,flush-writes", "has no call that flushes such writes"),
    ],
)
def test_why_the_adapter_does_not_reach_it(lacks: str, why: str) -> None:
    assert why in told(PROGRAMS / "adapter.py", "why", adapter=True, lacks=lacks)


def test_what_peers_do_not_reach() -> None:
    shown = told(PROGRAMS / "unreached.py", "job")
    (line,) = (line for line in shown.splitlines() if line.startswith("{"))
    said = json.loads(line)
    assert said.pop("beyond").startswith("SegmentError: ")
    assert all(words.startswith("UnavailableError: ") for words in said.values()), said
