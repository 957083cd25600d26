"""torchft over pgasdl: its own tests, and replicas that are killed and come back."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import jobs
import pytest
from support.environment import ONE_THREAD, environment
from support.patience import until
from support.starting import finished

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]  # its modules take a minute or two

MODULES = [
    "torchft.process_group_test",
    "torchft.reconfigure_test",
    "torchft.manager_integ_test",
    "torchft.local_sgd_integ_test",
    "torchft.checkpointing.pg_transport_test",
]
SECONDS = 20.0


@pytest.fixture(autouse=True)
def _installed() -> None:
    if find_spec("torchft") is None:
        pytest.skip("no torchft here: pip install torchft-nightly parameterized expecttest")


@pytest.mark.parametrize("module", MODULES)
def test_its_own_tests(module: str) -> None:
    judge = [sys.executable, str(jobs.PROGRAMS / "torchft_judge.py"), module]
    done = finished(judge, env=environment(**ONE_THREAD), timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.fixture
def lighthouse() -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=100)
    yield server.address()
    server.shutdown()


def replica(name: str, address: str, output: Path) -> subprocess.Popen[bytes]:
    program = str(jobs.PROGRAMS / "torchft_replica.py")
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, program, name, address, str(SECONDS)],
            env=environment(**ONE_THREAD), stdout=file,
        )  # fmt: skip


def test_replicas_are_killed_and_come_back(lighthouse: str, tmp_path: Path) -> None:
    """Every step that anybody takes, alone or with another, has the loss of one process."""
    survivor, other = tmp_path / "lives", tmp_path / "dies"
    lives, lost = replica("lives", lighthouse, survivor), 0
    other.touch()
    try:
        while lives.poll() is None:
            before = other.stat().st_size
            dies = replica("dies", lighthouse, other)
            until(lambda at=before: other.stat().st_size > at or lives.poll() is not None)
            time.sleep(0.5)
            dies.kill()
            dies.wait()
            lost += 1
    finally:
        lives.kill()
    # The last line of one that was killed may be cut off.
    told = survivor.read_text() + "".join(re.findall(r"dies .*\n", other.read_text()))
    assert (lives.returncode, lost > 1) == (0, True)
    taken = [(int(step), loss) for _, step, _, loss in map(str.split, told.splitlines())]
    sys.path.insert(0, str(jobs.PROGRAMS))
    from torchft_replica import losses

    wanted = losses(max(taken)[0] + 1)
    assert [loss for _, loss in taken] == [wanted[step] for step, _ in taken]
    assert {line.split()[2] for line in told.splitlines()} == {"1", "2"}
