"""Failures with memory on GPUs end in an error that says so, and leave nothing behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import launcher, mpi_rows
from support.starting import finished, succeeded
from tiers import full

pytestmark = pytest.mark.gate  # the fake driver is built first

PROGRAMS = Path(__file__).parent / "programs"
Fake = Callable[..., dict[str, str]]

# Arrays are copied through the host, in some pieces.
STAGED = {"PGASDL_GPU": "staged", "PGASDL_GPU_PIECE": "512"}

# Features that a fake driver lacks, the parts that need them, and the errors that say so.
VALUES = "streams of this driver must be able to "
REGISTERING = "bytes of host memory with the GPU's driver"
COLLECTIVES = dict.fromkeys(("handle", "allreduce", "exchange"))
LACKS: dict[str, dict[str, str]] = {
    "vmm": dict.fromkeys(("one_sided", *COLLECTIVES), "lacks virtual memory management"),
    "posix-handles": dict.fromkeys(("one_sided", *COLLECTIVES), "that descriptors name"),
    "unified-addressing": dict.fromkeys(("one_sided", *COLLECTIVES), "lacks unified addresses"),
    "ipc": {"one_sided": "no other process can be let into"},
    "stream-values": {"one_sided": VALUES},  # hosts advance collectives then
    "host-register": dict.fromkeys(("one_sided", *COLLECTIVES), REGISTERING),
    "host-pointer,dmabuf,rdma-with-vmm,wait-value-nor,flush-writes,writes-ordering": {},
    "peer": {},
}


def told(program: str, *arguments: object, env: dict[str, str], timeout: float = 100) -> Any:
    command = [sys.executable, str(PROGRAMS / program), *map(str, arguments)]
    return json.loads(succeeded(command, env=env, timeout=timeout))


@pytest.mark.parametrize("lacks", full(list(LACKS), quick=3))
def test_what_a_gpu_lacks(fake: Fake, lacks: str) -> None:
    """Each rank is told, and goes on with memory of the host."""
    for part, ranks in told("short.py", "lacking", env=fake(lacks=lacks)).items():
        wanted = LACKS[lacks].get(part)
        for said in ranks:
            if wanted is None:
                assert said == "works", part
            else:
                assert said.startswith("UnavailableError: ") and wanted in said, (part, said)


def test_gpus_that_do_not_reach_each_other(fake: Fake) -> None:
    """Neither rank has a segment then."""
    said = told("short.py", "lacking", "spread", env=fake(lacks="peer"))
    assert all("has no peer access" in each for ranks in said.values() for each in ranks), said
    said = told("short.py", "lacking", "spread", env=fake())
    assert {each for ranks in said.values() for each in ranks} == {"works"}, said


@pytest.mark.parametrize("path", [{}, STAGED], ids=["mapped", "staged"])
@pytest.mark.parametrize("step", full([1999, 97]))
def test_a_failing_call(fake: Fake, step: int, path: dict[str, str]) -> None:
    """Wherever it is: errors of ours, in time, nothing is left, and the next run works."""
    done = told("short.py", "failing", 1, step, env=fake() | path, timeout=300)
    assert done["calls"] > 300


UNREACHED = {
    "bound": "UnavailableError",
    "write": "UnavailableError",
    "write from the host": "UnavailableError",
    "write to the host": "UnavailableError",
    "write to oneself": "UnavailableError",
    "read": "UnavailableError",
    "read to the host": "UnavailableError",
    "write_notify": "UnavailableError",
    "write_notify_on": "UnavailableError",
    "atomic": "UnavailableError",
    "stream waits": "UnavailableError",
    "stream resets": "UnavailableError",
    "beyond": "SegmentError",
}


def kinds_of(shown: str) -> dict[str, str]:
    (line,) = (line for line in shown.splitlines() if "{" in line)
    said = json.loads(line[line.index("{") :])
    return {name: words.split(":")[0] for name, words in said.items()}


def test_what_peers_do_not_reach(fake: Fake) -> None:
    command = [sys.executable, str(PROGRAMS / "unreached.py")]
    assert kinds_of(succeeded(command, env=fake() | STAGED, timeout=60)) == UNREACHED


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
@pytest.mark.full
def test_what_peers_do_not_reach_over_mpi(fake: Fake, mpi: str) -> None:
    if missing := mpi_rows.missing(mpi):
        pytest.skip(missing)
    row = mpi_rows.ROWS[mpi]
    program = [str(PROGRAMS / "unreached.py"), "job"]
    command = launcher.command(f"--mpi={row.launcher}", "-n", "2", *program)
    environ = row.environ(fake() | {"PGASDL_TRANSPORT": "mpi"})
    assert kinds_of(succeeded(command, env=environ, timeout=60)) == UNREACHED


def test_ranks_that_differ_in_the_way_to_a_gpu(fake: Fake) -> None:
    program = [str(PROGRAMS / "unreached.py"), "differ"]
    command = launcher.command("-n", "2", "--no-prefix", *program)
    shown = succeeded(command, env=fake(), timeout=60)
    assert kinds_of(shown) == {"segment": "MismatchError"}
    assert "PGASDL_GPU" in shown


def test_wrong_input(fake: Fake) -> None:
    said = told("wrong.py", env=fake())
    for part in ("handle", "exchange", "first allreduce", "held allreduce", "allreduce"):
        for rank in said.pop(f"mixed {part}"):
            assert rank[part].startswith("MismatchError: "), rank
    words: dict[str, str] = {}
    for ranks in said.values():
        assert [list(rank) for rank in ranks] == [list(ranks[0])] * 2
        words |= ranks[1]
    kinds = {name: text.split(":")[0] for name, text in words.items()}
    assert kinds == {
        "host segment": "UnavailableError",
        "host slices": "UnavailableError",
        "host reset": "UnavailableError",
        "host allreduce": "BufferRefusedError",
        "host handle": "BufferRefusedError",
        "word": "ConfigError",
        "negative": "ConfigError",
        "handle": "PgasError",
        "handle, waiting": "PgasError",
        "notification": "NotificationError",
        "value 0": "NotificationError",
        "beyond": "SegmentError",
        "cuda:9": "UnavailableError",
        "tpu": "ConfigError",
        "exchange on cuda:9": "UnavailableError",
        "numpy": "UnavailableError",
        "memoryview": "BufferError",
        "atomic": "UnavailableError",
        "swap": "UnavailableError",
        "out": "BufferRefusedError",
        "small allreduce": "BufferRefusedError",
        "mean of integers": "BufferRefusedError",
        "complex": "BufferRefusedError",
        "no elements": "works",
        "a handle of none": "works",
        "no bytes": "works",
    }


@pytest.mark.parametrize(
    ("part", "path"),
    full(
        [
            ("exchange", {}),
            ("exchange", STAGED),
            ("notification", {}),
            ("handle", {}),
            ("handle", STAGED),
            ("allreduce", {}),
            ("allreduce", STAGED),
        ],
        quick=2,
    ),
    ids=lambda value: ("staged" if value else "mapped") if isinstance(value, dict) else value,
)
@pytest.mark.parametrize("how", ["killed", "late"])
def test_a_stream_that_waits_for_a_rank(
    fake: Fake, path: dict[str, str], how: str, part: str
) -> None:
    """It goes on soon after the rank is killed, or by its deadline; then the reason is told."""
    program = [str(PROGRAMS / "lost.py"), how, part]
    command = launcher.command("-n", "2", "--no-prefix", *program)
    done = finished(command, env=fake() | path, timeout=60)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    told = json.loads(line)
    assert told["seconds"] < 10, told  # the deadline is 20 if nothing is lost
    wanted, words = (
        ("PeerLostError", "rank 1 died") if how == "killed" else ("PgasTimeoutError", "")
    )
    assert told["said"].startswith(f"{wanted}: ") and words in told["said"], told


def test_a_forked_child(fake: Fake) -> None:
    command = launcher.command("-n", "2", "--no-prefix", str(PROGRAMS / "forks.py"))
    for line in succeeded(command, env=fake(), timeout=60).splitlines():
        told = json.loads(line)
        assert told["status"] == 0 and told["right"], told
        kinds = {said.split(":")[0] for said in told["said"].values()}
        assert kinds <= {"ClosedError", "UnavailableError"}, told["said"]


@pytest.mark.parametrize("path", [{}, STAGED], ids=["mapped", "staged"])
@pytest.mark.parametrize("times", full([20, 200], quick=1))
def test_nothing_is_left(fake: Fake, times: int, path: dict[str, str]) -> None:
    told("short.py", "repeating", times, env=fake(delay_us=10) | path)


@pytest.mark.parametrize("path", [{}, STAGED], ids=["mapped", "staged"])
def test_streams_get_what_they_wait_for(fake: Fake, path: dict[str, str]) -> None:
    """Also if what brings it is closed, or dropped, before."""
    command = [sys.executable, str(PROGRAMS / "ends.py")]
    assert succeeded(command, env=fake(delay_us=3000) | path, timeout=100) == "ok\n"
