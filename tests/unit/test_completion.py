"""The shells that complete the command: bash, zsh and fish, each as its user types."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.environment import environment
from support.starting import finished

from pgasdl.tools.cli import SHELLS, main

# What loads the script in a shell, completes ``pgasdl do`` and prints the result.
COMPLETING = {
    "bash": 'eval "$(pgasdl completion bash)"; COMP_WORDS=(pgasdl do) COMP_CWORD=1; '
    '_pgasdl_completion pgasdl; echo "${COMPREPLY[@]}"',
    "fish": 'pgasdl completion fish | source; complete -C "pgasdl do"',
}


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("do", ["doctor"]),
        ("bench ", ["write_notify", "allreduce", "model", "rdma", "mpi", "plans"]),
        ("bench allreduce --peers mpich,g", ["mpich,gloo"]),
        (
            "bench allreduce --plan gdraa-",
            ["gdraa-direct", "gdraa-nodes", "gdraa-private", "gdraa-read"],
        ),
        ("bench model res", ["resnet50"]),
        ("run --transport ", ["auto", "shm", "verbs", "mpi", "loopback"]),
        ("run --mpi o", ["openmpi"]),
        ("run -n 2 tr", ["tr"]),  # a file
        ("sim --machine f", ["fat-tree", "flat"]),
        ("sim --plans ring,halv", ["ring,halving-doubling"]),
        ("doctor --js", ["--json"]),
        ("completion ", list(SHELLS)),
    ],
)
def test_values_complete(
    line: str,
    values: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = line.split(" ")
    monkeypatch.setenv("COMP_WORDS", f"pgasdl {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    monkeypatch.setenv("_PGASDL_COMPLETE", "bash_complete")
    assert main([]) == 0
    assert [row.partition(",")[2] for row in capsys.readouterr().out.splitlines()] == values


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_takes_its_script(shell: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capfd.readouterr().out
    assert "_PGASDL_COMPLETE" in script
    program = shutil.which(shell)
    if program is not None:
        done = subprocess.run(
            [program, "-n"], input=script, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_the_package_does_not_need_click(tmp_path: Path) -> None:
    program = "import sys, pgasdl; pgasdl.init; assert 'click' not in sys.modules"
    subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment(), cwd=tmp_path, check=True
    )


def with_command(home: Path) -> dict[str, str]:
    """An environment in which ``pgasdl`` is a command, and no start-up file is read."""
    folder = str(Path(sys.executable).parent)
    return environment(PATH=f"{folder}:{os.environ['PATH']}", HOME=str(home), TERM="xterm")


@pytest.mark.parametrize("shell", COMPLETING)
def test_a_shell_completes(shell: str, tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell}")
    done = finished([program, "-c", COMPLETING[shell]], env=with_command(tmp_path), timeout=60)
    assert done.stdout.split()[0] == "doctor" and not done.stderr


def test_zsh_completes_what_is_typed(tmp_path: Path) -> None:
    """At a terminal, since zsh completes nowhere else."""
    program = shutil.which("zsh")
    if program is None:
        pytest.skip("no zsh")
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [program, "-f", "-i"],
        env=with_command(tmp_path),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)

    def shown_until(word: bytes) -> None:
        shown, end = b"", time.monotonic() + 30
        while word not in shown:
            ready, _, _ = select.select([master], [], [], max(0, end - time.monotonic()))
            assert ready, f"{word!r} is not in {shown!r}"
            shown += os.read(master, 65536)

    try:
        load = b'autoload -U compinit; compinit -D -u; eval "$(pgasdl completion zsh)"; '
        os.write(master, load + b'echo load""ed\n')
        shown_until(b"loaded")
        os.write(master, b'echo comp""leted; pgasdl completion zs\t\n')
        shown_until(b"completed")
        shown_until(b"_PGASDL_COMPLETE=zsh_complete")
    finally:
        process.kill()
        process.wait()
        os.close(master)
