"""``pgasdl run --mpi KIND``, also as root, as in containers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from support.environment import environment
from support.launcher import command
from support.leftovers import state_of
from support.mpi_rows import Row
from support.patience import until
from support.starting import finished, running

from pgasdl.runtime.launch.mpiexec import LAUNCHERS


def launched(mpi: Row, program: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Start two ranks from an environment that holds only paths."""
    kept = {name: environment()[name] for name in ("PATH", "PYTHONPATH")}
    return finished(
        command("-n", "2", "--mpi", mpi.launcher, str(program)),
        env=mpi.environ(kept) | variables,
        timeout=120,
    )


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(
        "import pgasdl\n"
        "with pgasdl.init(log='warning') as ctx:\n"
        "    assert ctx.transport_of(1 - ctx.rank) == 'mpi'\n"
        "    ctx.barrier()\n"
        "print(f'{ctx.rank} of {ctx.size}', flush=True)\n"
    )
    return file


def test_the_kind_is_a_word_of_its_own(mpi: Row, program: Path) -> None:
    done = launched(mpi, program)
    assert done.returncode == 0, done.stderr
    # MPICH may forward a line in several pieces.
    assert sorted(re.findall(r"\d of \d", done.stdout)) == ["0 of 2", "1 of 2"]
    # Open MPI must be told that root is allowed; pgasdl says what it sets in the user's place.
    told = os.geteuid() == 0 and mpi.kind == "openmpi"
    assert ("OMPI_ALLOW_RUN_AS_ROOT and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" in done.stderr) == told


def test_who_tells_it_himself_hears_nothing(mpi: Row, program: Path) -> None:
    done = launched(mpi, program, **dict.fromkeys(LAUNCHERS[mpi.kind].root, "1"))
    assert done.returncode == 0, done.stderr
    assert "pgasdl" not in done.stderr


@pytest.mark.parametrize("mpi", ["openmpi", "debian_openmpi"], indirect=True)
def test_after_a_killed_launcher_with_the_same_number(
    mpi: Row, program: Path, tmp_path: Path
) -> None:
    """Its leftovers do not hinder the next one: numbers of processes come again."""
    environ = mpi.environ(environment()) | {"TMPDIR": str(tmp_path)}
    launch = command("-n", "2", "--mpi", mpi.launcher, str(program))
    program.write_text(f"{program.read_text()}import time; time.sleep(60)\n")
    with running(launch, env=environ) as killed:
        assert killed.stdout is not None
        killed.stdout.readline()
        killed.kill()
    program.write_text("print('there')")
    stopped = ["sh", "-c", 'kill -STOP $$; exec "$@"', "sh", *launch]
    with running(stopped, env=environ) as later:
        assert until(lambda: state_of(later.pid) == "T", 20)
        for left in tmp_path.rglob(f"*{killed.pid}"):
            left.rename(left.with_name(left.name.replace(str(killed.pid), str(later.pid))))
        os.kill(later.pid, signal.SIGCONT)
        out, err = later.communicate(timeout=120)
    # Open MPI's ranks write to a terminal, which passes a line and its end on one by one.
    assert (later.returncode, out.count("there")) == (0, 2), out + err


@pytest.mark.parametrize("mpi", ["openmpi", "debian_openmpi"], indirect=True)
def test_a_failing_ranks_launcher_finds_its_words(mpi: Row, program: Path) -> None:
    program.write_text("raise SystemExit(3)\n")
    done = launched(mpi, program)
    assert done.returncode == 3
    assert "help file" not in done.stderr
    assert "exited with non-zero status" in done.stderr
