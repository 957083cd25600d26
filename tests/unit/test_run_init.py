"""``pgasdl.init`` under every installed launcher: real processes, the whole start-up."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from foreign_launchers import ALLOWED, tool
from support.environment import environment
from support.launcher import run
from support.requiring import lacking
from support.starting import finished

import pgasdl
from pgasdl import loopback

pytest.importorskip("pgasdl._native")

PROGRAM = """
import sys
import numpy as np
import pgasdl
for turn in range(2):
    with pgasdl.init(timeout=30) as ctx:
        total = ctx.world.combine(np.array([ctx.rank + 1.0]), op="sum")
sys.stdout.write(f"rank {ctx.rank} of {ctx.size}: {total[0]:g}\\n")
"""


def launched(
    program: Path, *command: str, status: int = 0, arguments: tuple[str, ...] = ()
) -> list[str]:
    """The ranks' lines, sorted; ``command`` is the launcher's part of the command."""
    result = finished(
        [*command, str(program), *arguments],
        env=environment(**ALLOWED),
        timeout=120,
        cwd=program.parent,
    )
    assert result.returncode == status, result.stdout + result.stderr
    return sorted(line for line in result.stdout.splitlines() if "rank" in line)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


RUN = (sys.executable, "-m", "pgasdl", "run")


@pytest.mark.parametrize("n", [1, 2, 4])
def test_pgasdl_run(program: Path, n: int) -> None:
    lines = launched(program, *RUN, "-n", str(n))
    total = n * (n + 1) // 2
    assert lines == [f"[{rank}] rank {rank} of {n}: {total}" for rank in range(n)]


def test_alone(program: Path) -> None:
    assert launched(program, sys.executable) == ["rank 0 of 1: 1"]
    with (
        pgasdl.init(size=1, rank=0) as ctx,
        pytest.raises(pgasdl.RankError, match="0 to 0; `pgasdl run -n 2 PROGRAM` starts two"),
    ):
        ctx.notify(1, ctx.segment(8), 1)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "through a shell"])
def test_mpich(program: Path, wrapped: bool) -> None:
    shell = ["/bin/sh", "-c", f'{sys.executable} "$0"; exit $?']  # then it is each rank's parent
    command = shell if wrapped else [sys.executable]
    lines = launched(program, tool("mpiexec.hydra"), "-n", "2", *command)
    assert lines == ["rank 0 of 2: 3", "rank 1 of 2: 3"]


def test_openmpi(program: Path) -> None:
    command = (tool("prterun"), "--personality", "ompi", "-n", "2", sys.executable)
    assert launched(program, *command) == ["rank 0 of 2: 3", "rank 1 of 2: 3"]


def test_torchrun(program: Path) -> None:
    lines = launched(program, tool("torchrun"), "--standalone", "--nproc-per-node", "2")
    assert lines == ["rank 0 of 2: 3", "rank 1 of 2: 3"]


def test_whom_a_rank_lets_reach_its_bound_memory(tmp_path: Path) -> None:
    """It names to Yama its only peer or, with several, their launcher, which started nobody else.

    A process cannot be asked whom it has named, and few machines have Yama.
    """
    program = tmp_path / "named.py"
    program.write_text(
        "import os, sys\n"
        "import pgasdl\n"
        "from pgasdl import _native\n"
        "with pgasdl.init(timeout=30) as ctx:\n"
        "    peers = [ctx._pid_of(peer) for peer in range(ctx.size) if peer != ctx.rank]\n"
        "    named = _native.common_ancestor(peers)\n"
        "    ctx.bind(bytearray(8))\n"
        "    right = peers[0] if ctx.size == 2 else os.getppid()\n"
        "    sys.stdout.write(f'rank {ctx.rank}: {named == right}\\n')\n"
        "    ctx.barrier()\n"
    )
    for n in (2, 3):
        lines = launched(program, *RUN, "-n", str(n))
        assert lines == [f"[{rank}] rank {rank}: True" for rank in range(n)]


def test_every_context_of_a_process_dumps_on_sigusr1() -> None:
    program = (
        "import os, signal, pgasdl\n"
        "for turn in (1, 2):\n"
        "    with pgasdl.init() as ctx:\n"
        "        os.kill(os.getpid(), signal.SIGUSR1)\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    result = finished([sys.executable, "-c", program], env=environment(), timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("on SIGUSR1") == 2


@pytest.mark.parametrize("killer", [1, 0])
def test_survivor_names_the_rank_that_was_killed(tmp_path: Path, killer: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "import pgasdl\n"
        "with pgasdl.init(timeout=30) as ctx:\n"
        "    ctx.barrier()\n"
        "    if ctx.rank == 1 == int(sys.argv[1]): os.kill(os.getpid(), 9)\n"
        "    if ctx.rank == 0 == int(sys.argv[1]): ctx.kill(1)\n"
        "    if ctx.rank == 1: time.sleep(1000)\n"
        "    try: ctx.barrier()\n"
        "    except pgasdl.PeerLostError as error:\n"
        "        sys.stdout.write(f'rank {error.rank} is lost\\n'); raise\n"
    )
    lines = launched(program, *RUN, "-n", "2", status=137, arguments=(str(killer),))
    assert lines == ["[0] rank 1 is lost"]


def test_a_process_that_a_rank_started_is_refused_at_once(tmp_path: Path) -> None:
    """Before the rank's own init, where it has the variable, and after it, where it has not."""
    (tmp_path / "program.py").write_text(
        "import multiprocessing, pgasdl\n"
        "def child():\n"
        "    try:\n"
        "        pgasdl.init(timeout=60)\n"
        "    except pgasdl.BootstrapError as error:\n"
        "        print(error)\n"
        "def spawned():\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start()\n"
        "    process.join(50)\n"
        "    assert process.exitcode == 0, process.exitcode\n"
        "if __name__ == '__main__':\n"
        "    spawned()\n"
        "    with pgasdl.init():\n"
        "        spawned()\n"
        "    with pgasdl.init() as ctx:  # a second init finds the secret\n"
        "        ctx.barrier()\n"
    )
    result = run("-n", "2", "program.py", cwd=tmp_path, timeout=100)
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        before, after = (line for line in result.stdout.splitlines() if line[1] == str(rank))
        assert re.search(r"PGASDL_SECRET_FD=\d+ is not the secret of a job", before)
        assert "a process that a rank started is no rank of its job" in after


def test_a_rank_that_ended_before_its_init_is_awaited_no_longer(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, sys\n"
        "if os.environ['PGASDL_RANK'] == '1':\n"
        "    sys.exit()\n"
        "import pgasdl\n"
        "try:\n"
        "    pgasdl.init(timeout=1000)\n"
        "except pgasdl.PeerLostError as error:\n"
        "    print(error)\n"
    )
    result = run("-n", "3", "program.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    told = "rank 1 ended before its pgasdl.init was over"
    assert sorted(result.stdout.splitlines()) == [f"[0] {told}", f"[2] {told}"]


def test_a_machine_without_loopback_is_told_at_once() -> None:
    without = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*without, "true"], check=False, capture_output=True).returncode != 0:
        lacking("no network namespaces here")
    line = [*without, *RUN, "-n", "2", "-c", "import pgasdl; pgasdl.init(timeout=1000)"]
    result = finished(line, env=environment(), timeout=60)
    assert result.returncode == 1
    assert "the loopback interface is down; ip link set lo up" in result.stderr


def test_a_user_whom_the_namespace_does_not_know_hands_out_no_secret(program: Path) -> None:
    """All such users look alike to it, strangers, too."""
    unmapped = ["unshare", "--user"]
    if subprocess.run([*unmapped, "true"], check=False, capture_output=True).returncode != 0:
        lacking("no user namespaces here")
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    code = "import pgasdl; pgasdl.init(timeout=1000)"
    result = finished([*unmapped, sys.executable, "-c", code], env=environment(**place), timeout=60)
    assert result.returncode == 1
    assert "stands for all users whom this user namespace does not know" in result.stderr


def test_an_error_whose_causes_go_round_ends_its_rank() -> None:
    def program(ctx: Any) -> None:
        first, second = ValueError("first"), ValueError("second")
        second.__cause__ = first
        raise first from second

    with pytest.raises(ValueError, match="first"):
        loopback.run(1, program)
