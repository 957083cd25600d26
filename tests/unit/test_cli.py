"""The command at a terminal and in a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from support.environment import environment
from support.starting import finished
from tiers import full

from pgasdl.tools.cli import main

PGASDL = (sys.executable, "-P", "-m", "pgasdl")
FAST = ("--repeat", "1", "--seconds", "0.001")
BENCH = ("bench", "allreduce", "--sizes", "64", *FAST)
SIM = ("sim", "-n", "4", "--size", "1K")
TUNE = ("tune", "--transport", "loopback", "--sizes", "64", *FAST)
PLANS = ("bench", "plans", "-n", "2", "--transport", "shm", "--sizes", "64", *FAST)
PAPER = ("sim", "--paper", "caffegpi")


def piped(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return finished([*PGASDL, *arguments], env=environment(**variables), timeout=60, cwd=cwd)


def at_terminal(*arguments: str, cwd: Path, **variables: str) -> tuple[int, str]:
    """The status, and every byte sent to the terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*PGASDL, *arguments], env=environment(**variables), cwd=cwd, stdin=slave, stdout=slave,
        stderr=slave,
    )  # fmt: skip
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):
        while data := os.read(master, 65536):
            shown += data
    os.close(master)
    return process.wait(60), shown.decode()


# --- a terminal


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False)],
)
def test_colour_at_a_terminal(tmp_path: Path, variables: dict[str, str], coloured: bool) -> None:
    status, shown = at_terminal("doctor", cwd=tmp_path, **variables)
    assert status == 0 and ("\x1b[32m" in shown) == coloured


def test_colour_in_a_pipe_is_forced(tmp_path: Path) -> None:
    assert "\x1b" not in piped("doctor", cwd=tmp_path).stdout
    assert "\x1b[32m" in piped("doctor", cwd=tmp_path, FORCE_COLOR="1").stdout


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("do", ["doctor"]),
        ("bench ", ["write_notify", "allreduce", "model", "c10d", "plans"]),
        ("bench model vgg16,res", ["vgg16,resnet50"]),
        ("run --transport ", ["auto", "shm", "verbs", "mpi", "tcp", "loopback"]),
        ("run --mpi o", ["openmpi"]),
        ("run -n 2 tr", ["tr"]),  # a file
        ("sim --plans ring,halv", ["ring,halving-doubling"]),
        ("doctor --js", ["--json"]),
    ],
)
def test_values_complete(
    line: str,
    values: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COMP_WORDS", f"pgasdl {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" "))))
    monkeypatch.setenv("_PGASDL_COMPLETE", "bash_complete")
    assert main([]) == 0
    assert [row.partition(",")[2] for row in capsys.readouterr().out.splitlines()] == values


def test_the_package_does_not_need_click(tmp_path: Path) -> None:
    program = "import sys, pgasdl; pgasdl.init; assert 'click' not in sys.modules"
    subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment(), cwd=tmp_path, check=True
    )


# --- one document


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (("env",), {"variables", "problems"}),
        (("topo",), {"addresses", "missing", "fix"}),
        (BENCH, {"op", "bytes", "us", "floor_us"}),
        pytest.param(PLANS, {"plan", "us", "predicted_us"}, marks=pytest.mark.full),
        pytest.param(TUNE, {"policy", "sizes", "calibration", "file"}, marks=pytest.mark.full),
        (SIM, {"machine", "bytes", "plans", "library"}),
        pytest.param(PAPER, {"paper", "source", "tables"}, marks=pytest.mark.full),
    ],
)
def test_json_is_all_there_is_on_standard_output(
    tmp_path: Path, arguments: tuple[str, ...], keys: set[str]
) -> None:
    done = piped(*arguments, "--json", cwd=tmp_path)
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert keys <= (found[0] if isinstance(found, list) else found).keys()
    assert not done.stderr


# --- wrong lines


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("doctr", "no command 'doctr'; did you mean 'doctor'? there are run, "),
        ("rnu", "did you mean 'run'?"),
        ("bench alreduce -n 2", "no command 'alreduce'; did you mean 'allreduce'?"),
        ("bench allreduce --plan gdra", "no plan 'gdra'; did you mean 'gdraa'? there are "),
        ("bench model resnet5 --json", "no model 'resnet5'; did you mean 'resnet50'? "),
        ("tune --transport shn", "no transport 'shn'; did you mean 'shm'? there are auto, shm, "),
        ("sim --machin flat", "--machine"),
        ("job snd 1 stop", "no command 'snd'; did you mean 'send'?"),
        (
            "job send nosuch",
            "'nosuch' is not the number of a job, which comes first, as in `pgasdl ",
        ),
        ("sim --plans ring,tre(chunks=2)", "no plan 'tre'; did you mean "),
        ("sim --size 1.5K", "pgasdl sim --help"),
        ("run -n 2", "no program: give a file"),
        ("run p.py", "Missing option '-n'"),
    ],
)
def test_a_wrong_line(line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert told in captured.err and not captured.out


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["bench"]):
        assert main(words) == 2
        assert "Commands:" in capsys.readouterr().err
        assert main([*words, "-h"]) == 0
        assert "Commands:" in capsys.readouterr().out


def test_a_missing_module_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pgasdl.simulate.cli", None)
    assert main(["sim"]) == 1
    assert "sim is not available" in capsys.readouterr().err
    assert main(["--help"]) == 0  # help loads no command's module


@pytest.mark.parametrize("words", [BENCH, *full([(TUNE,), (PLANS,)])])
def test_an_error_of_the_ranks_is_no_traceback(tmp_path: Path, words: tuple[str, ...]) -> None:
    there_is_none = {"PGASDL_VERBS_DEVICE": "there_is_none"}
    done = piped(*words, "--transport", "verbs", cwd=tmp_path, **there_is_none)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    command = words[0] if words is TUNE else " ".join(words[:2])
    assert f"pgasdl {command}: rank " in done.stderr and "`pgasdl doctor`" in done.stderr


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as gone:
        done = subprocess.run(
            [*PGASDL, "env"], env=environment(), cwd=tmp_path, stdout=gone,
            stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("word", ["version", "env"])  # flushed at the end; and before
def test_a_full_device_is_an_error_in_a_line(word: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*PGASDL, word], env=environment(), cwd="/", stdout=full, stderr=subprocess.PIPE,
            text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "pgasdl: error: No space left on device\n")
