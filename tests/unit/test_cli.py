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
from pgasdl.tools.progress import Progress

PGASDL = (sys.executable, "-P", "-m", "pgasdl")
FAST = ("--repeat", "1", "--seconds", "0.001")
BENCH = ("bench", "allreduce", "--sizes", "64", *FAST)
SIM = ("sim", "-n", "4", "--size", "1K")
TUNE = ("tune", "--transport", "loopback", "--sizes", "64", *FAST)
PLANS = ("bench", "plans", "-n", "2", "--transport", "shm", "--sizes", "64", *FAST)
PAPER = ("sim", "--paper", "caffegpi")
EXAMPLE = "try: pgasdl run -n 2 train.py\n     pgasdl run --help\n"


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


def left(shown: str) -> list[str]:
    """The lines that stay on the screen."""
    lines = []
    for line in shown.replace("\r\n", "\n").split("\n"):
        screen = ""
        for part in line.split("\r"):
            screen = part + screen[len(part) :]
        lines.append(screen.rstrip())
    return lines


# --- progress and colour


@pytest.mark.parametrize(
    ("arguments", "bar", "stays"),
    [
        (("doctor",), "doctor  [#", "\x1b[32mOK  \x1b[0m  python"),
        (BENCH, "pgasdl bench allreduce, 2 ranks  [#", "transport  shm"),
        pytest.param(
            TUNE, "pgasdl tune, 2 ranks  [#", "policy     allreduce:0-inf", marks=pytest.mark.full
        ),
        pytest.param(SIM, "sim  [#", "machine  flat(4)", marks=pytest.mark.full),
    ],
)
def test_long_work_shows_a_bar_that_leaves_nothing_behind(
    tmp_path: Path, arguments: tuple[str, ...], bar: str, stays: str
) -> None:
    status, shown = at_terminal(*arguments, cwd=tmp_path)
    assert status == 0, shown
    assert f"\r{bar}" in shown and "100%" in shown
    lines = left(shown)
    assert not any("[#" in line or "[-" in line for line in lines), lines
    assert any(line.startswith(stays) for line in lines), lines


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("run", "-n", "1", "-c", "print('here')"), "[0] here"),
        (("env",), "PGASDL_TIMEOUT"),
        (("topo",), "transport verbs"),
        (("version",), "."),
        (("completion", "bash"), "complete "),
    ],
)
def test_short_work_shows_no_bar(tmp_path: Path, arguments: tuple[str, ...], word: str) -> None:
    status, shown = at_terminal(*arguments, cwd=tmp_path)
    assert status == (arguments == ("topo",) and "no transport verbs" in shown)
    assert word in shown and "\x1b[3" not in shown and "%" not in shown


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False)],
)
def test_errors_are_coloured_at_a_terminal(
    tmp_path: Path, variables: dict[str, str], coloured: bool
) -> None:
    status, shown = at_terminal("doctr", cwd=tmp_path, **variables)
    assert status == 2 and ("\x1b[31m" in shown) == coloured
    assert coloured or "pgasdl: error: no command 'doctr'; there are run, " in shown


def test_errors_in_a_pipe_are_plain_unless_colour_is_forced(tmp_path: Path) -> None:
    assert "\x1b" not in piped("doctr", cwd=tmp_path).stderr
    assert "\x1b[31m" in piped("doctr", cwd=tmp_path, FORCE_COLOR="1").stderr


def test_a_bar_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("pgasdl.tools.progress._columns", lambda: 30)
    with Progress("a label", 2) as progress:
        progress.step()
        with progress.aside():
            print("line", file=sys.stderr)
    shown = capsys.readouterr().err
    assert max(map(len, shown.replace("\n", "\r").split("\r"))) == 29
    assert left(shown) == ["line", ""]


# --- one document


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (("env",), {"variables", "problems"}),
        (("topo",), {"addresses", "missing", "fix"}),
        (("version",), {"version"}),
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
    assert done.returncode in ((0, 1) if arguments == ("topo",) else (0,))
    found = json.loads(done.stdout)
    assert keys <= (found[0] if isinstance(found, list) else found).keys()
    assert not done.stderr


def test_json_in_a_file_stands_beside_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "document"
    assert main(["env", "--json", str(file)]) == 0
    assert "PGASDL_TIMEOUT" in capsys.readouterr().out
    assert json.loads(file.read_text())["problems"] == []
    assert main(["env", "--json=-"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())
    assert main(["version", "--json", str(tmp_path / "no" / "document")]) == 2
    assert "--json" in capsys.readouterr().err


# --- what to type next


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("doctr", "try: pgasdl doctor\n"),
        ("bnch allreduce", "try: pgasdl bench allreduce\n"),
        ("bench alreduce -n 2", "try: pgasdl bench allreduce -n 2\n"),
        ("bench allreduce --plan gdra", "try: pgasdl bench allreduce --plan gdraa\n"),
        ("bench allreduce --peers=gloo,mpch", "try: pgasdl bench allreduce --peers=gloo,mpich\n"),
        ("bench model resnet5 --json", "try: pgasdl bench model resnet50 --json\n"),
        ("bench model --json vgg16", "a model comes first, as in vgg16 --json"),
        ("tune --transport shn", "try: pgasdl tune --transport shm\n"),
        ("sim --machin flat", "try: pgasdl sim --machine flat\n"),
        ("sim --plans ring,tre(chunks=2)", "try: pgasdl sim --plans 'ring,tree(chunks=2)'\n"),
        ("sim --size 1.5K", "\n     pgasdl sim --help\n"),
        ("run -n 2 --transport shn p.py x", "try: pgasdl run -n 2 --transport shm p.py x\n"),
        ("run -n 2", EXAMPLE),
        ("run p.py", EXAMPLE),
        ("completion ksh", "try: pgasdl completion zsh\n"),
    ],
)
def test_a_wrong_line_is_answered_with_a_better_one(
    line: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
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
    monkeypatch.setitem(sys.modules, "pgasdl.tools.simulate.cli", None)
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
