"""``pgasdl run``: what reaches the ranks, and what of their output reaches the user.

The ranks are small programs that do not use pgasdl: only the launcher is tested.
"""

from __future__ import annotations

import ast
import contextlib
import os
import pty
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.environment import environment
from support.launcher import command, run, running
from support.places import APPS
from support.starting import finished

from pgasdl.runtime.launch.output import MAX_LINE, visible
from pgasdl.tools.run_cli import split_program

# The input, arguments and signals that reach the ranks.


@pytest.mark.parametrize(
    ("given", "options", "program"),
    [
        (["-n", "2", "p.py", "-n", "3"], ["-n", "2"], ["p.py", "-n", "3"]),
        (["-n2", "-m", "mod", "--x"], ["-n2"], ["-m", "mod", "--x"]),
        (["--no-prefix", "-n", "2", "-c", "pass"], ["--no-prefix", "-n", "2"], ["-c", "pass"]),
        (["--timeout", "5", "p.py"], ["--timeout", "5"], ["p.py"]),
        (["--timeout=5", "p.py", "--", "x"], ["--timeout=5"], ["p.py", "--", "x"]),
        (["-n", "2", "--", "p.py", "--", "x"], ["-n", "2"], ["p.py", "--", "x"]),
        (["-n"], ["-n"], []),
        ([], [], []),
        (["--mpi", "mpich", "p.py", "x"], ["--mpi", "mpich"], ["p.py", "x"]),
        (["--mpi", "any", "-m", "mod"], ["--mpi", "any"], ["-m", "mod"]),
        (["--mpi", "/usr/bin/prterun", "p.py"], ["--mpi", "/usr/bin/prterun"], ["p.py"]),
        (["--mpi=openmpi", "mpich"], ["--mpi=openmpi"], ["mpich"]),
        (["--mpi", "p.py", "mpich"], ["--mpi"], ["p.py", "mpich"]),
        (["--mpi", "./mpich"], ["--mpi"], ["./mpich"]),
        (["--mpi", "--", "mpich"], ["--mpi"], ["mpich"]),
        (["--mpi", "-n", "2", "p.py"], ["--mpi", "-n", "2"], ["p.py"]),
        (["-n", "2", "--mpi"], ["-n", "2", "--mpi"], []),
    ],
)
def test_program_starts_at_the_first_that_is_no_option(
    given: list[str], options: list[str], program: list[str]
) -> None:
    assert split_program(given) == (options, program)


def test_a_launcher_by_another_name_is_a_value_too(tmp_path: Path) -> None:
    (tmp_path / "prterun").touch()
    link = tmp_path / "mpiexec"
    link.symlink_to("prterun")
    assert split_program(["--mpi", str(link), "p.py"]) == (["--mpi", str(link)], ["p.py"])
    other = str(tmp_path / "other")
    assert split_program(["--mpi", other, "p.py"]) == (["--mpi"], [other, "p.py"])


@pytest.mark.parametrize("option", ["--keep-going", "--grace=3", "--no-prefix"])
def test_options_that_an_mpi_s_launcher_does_not_have(option: str) -> None:
    result = run("-n", "2", "--mpi", option, "-c", "pass")
    assert result.returncode == 2
    assert "its launcher has no --grace, --keep-going or --no-prefix" in result.stderr


def test_neither_an_mpi_nor_a_program_is_refused() -> None:
    result = run("-n", "2", "--mpi", "lam", "p.py")
    assert result.returncode == 2
    assert "--mpi lam: neither an MPI (mpich, openmpi, or the path of a launcher)" in result.stderr


def test_place_arguments_and_standard_input(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, sys\n"
        "v = {k: e for k, e in os.environ.items() if k.startswith('PGASDL_')}\n"
        "fd = int(v['PGASDL_SECRET_FD'])\n"
        "secret = os.pread(fd, 64, 0)\n"
        "hidden = secret.hex() not in repr(os.environ) and len(secret) == 32\n"
        "threads = os.environ['OMP_NUM_THREADS']\n"
        "unbuffered = sys.stdout.write_through\n"
        "told = sys.argv, sys.stdin.read(), hidden, v, threads, unbuffered, os.getcwd()\n"
        "sys.stdout.write(repr(told) + '\\n')\n"
    )
    odd = ["-n", "9", "--", "", "a b", "$HOME", "*", "ü", "--help"]
    result = run(
        "-n", "3", "--transport", "shm", "--timeout", "7.5", "program.py", *odd,
        stdin="in\nput", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    assert len(lines) == 3
    jobs = set()
    for rank, line in enumerate(lines):
        assert line.startswith(f"[{rank}] ")
        told = ast.literal_eval(line[4:])
        argv, stdin, hidden, variables, threads, unbuffered, cwd = told
        assert argv == ["program.py", *odd] and cwd == str(tmp_path)
        assert stdin == ("in\nput" if rank == 0 else "")
        assert hidden and unbuffered
        assert threads == str(max(1, len(os.sched_getaffinity(0)) // 3))
        assert variables["PGASDL_RANK"] == variables["PGASDL_LOCAL_RANK"] == str(rank)
        assert variables["PGASDL_SIZE"] == variables["PGASDL_LOCAL_SIZE"] == "3"
        assert variables["PGASDL_TRANSPORT"] == "shm" and variables["PGASDL_TIMEOUT"] == "7.5"
        assert re.fullmatch(r"127\.0\.0\.1:\d+", variables["PGASDL_STORE"])
        jobs.add(variables["PGASDL_JOB_ID"])
    assert len(jobs) == 1


def test_modules_and_the_user_s_thread_count(tmp_path: Path) -> None:
    (tmp_path / "mod.py").write_text(
        "import os, sys; print(os.environ['OMP_NUM_THREADS'], sys.argv[1:])"
    )
    result = run("-n", "2", "-m", "mod", "-x", cwd=tmp_path, OMP_NUM_THREADS="7")
    assert sorted(result.stdout.splitlines()) == ["[0] 7 ['-x']", "[1] 7 ['-x']"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-n", "0", "-c", "pass"], "at least one rank"),
        (["-n", "-1", "-c", "pass"], "at least one rank"),
        (["-n", "two", "-c", "pass"], "not a valid integer"),
        (["-c", "pass"], "-n"),
        (["-n", "2"], "no program"),
        (["-n", "2", "/no/such.py"], "no such program: /no/such.py"),
        (["-n", "2", str(APPS / "halo_notify.py")], "did you mean hello_notify.py?"),
        (["-n", "2", "/tmp"], "__main__"),
        (["-n", "2", "-m"], "needs a module"),
        (["-n", "2", "--frobnicate", "-c", "pass"], "--frobnicate"),
        (["-n", "2", "--transport", "pigeon", "-c", "pass"], "no transport 'pigeon'"),
        (["-n", "2", "--timeout", "x", "-c", "pass"], "PGASDL_TIMEOUT"),
    ],
)
def test_wrong_use_starts_nothing(
    arguments: list[str], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from pgasdl.tools.cli import main

    status = main(["run", *arguments])
    captured = capfd.readouterr()
    assert status == 2 and reason in captured.err and not captured.out


def test_unknown_variable_is_refused_before_anything_starts() -> None:
    result = run("-n", "2", "-c", "print('started')", PGASDL_TIMOUT="1")
    assert result.returncode == 2 and "PGASDL_TIMEOUT" in result.stderr
    assert not result.stdout


# Output.


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"plain", b"plain"),
        (b"windows\r", b"windows"),
        (b"10%\r50%\r100%", b"100%"),
        (b"10%\r50%\r100%\r", b"100%"),
        (b"\r10%", b"10%"),
        (b"\r", b""),
        (b"", b""),
    ],
)
def test_what_a_carriage_return_leaves(line: bytes, shown: bytes) -> None:
    assert visible(line) == shown


def test_lines_stay_whole_and_both_streams_apart() -> None:
    program = (
        "import sys, os\n"
        "for i in range(2000): print('o' * 90, i)\n"
        "print('last', end='')\n"
        "print('e' * 50, file=sys.stderr)\n"
    )
    result = run("-n", "3", "-c", program)
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 3 * 2001
    assert all(re.fullmatch(r"\[\d\] (o{90} \d+|last)", s) for s in result.stdout.splitlines())
    for rank in range(3):
        mine = [s[4:] for s in result.stdout.splitlines() if s.startswith(f"[{rank}] o")]
        assert mine == [f"{'o' * 90} {i}" for i in range(2000)]
    *errors, _ = result.stderr.splitlines()  # the last is the launcher's own
    assert sorted(errors) == [f"[{rank}] {'e' * 50}" for rank in range(3)]


@pytest.mark.parametrize("n", [300_000, 2 * MAX_LINE])
def test_a_long_line_is_cut_only_where_it_has_to_be(n: int) -> None:
    pieces = -(-n // MAX_LINE)
    result = run("-n", "1", "-c", f"print('x' * {n})")
    assert result.stdout == f"[0] {'x' * (n // pieces)}\n" * pieces


def test_progress_bar_in_a_file_is_its_last_state() -> None:
    program = "import sys\nfor i in range(0, 101, 10): sys.stdout.write(f'\\r{i}%')\nprint()"
    assert run("-n", "1", "-c", program).stdout == "[0] 100%\n"


def test_no_prefix() -> None:
    result = run("-n", "2", "--no-prefix", "-c", "import os; os.write(1, b'a\\rb\\n')")
    assert result.stdout == "a\nb\na\nb\n"  # as text: the carriage return was passed on as it is


def test_slow_reader_loses_nothing() -> None:
    program = "for i in range(40000): print(i, 'x' * 100)"
    with running("-n", "1", "-c", program) as process:
        time.sleep(1.0)  # the rank writes more than pipes and the launcher keep
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
    assert [int(line.split()[1]) for line in lines] == list(range(40000))


def test_reader_that_goes_away_ends_the_job() -> None:
    with running("-n", "2", "-c", "while True: print('y' * 100)") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(15) == 128 + signal.SIGPIPE


def test_a_full_device_ends_the_job_with_the_reason() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command("-n", "2", "-c", "print('out')"), env=environment(), cwd="/", text=True,
            stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False,
        )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr == "pgasdl run: error: cannot write output: No space left on device\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_the_null_device(tmp_path: Path, closed: str) -> None:
    program = (
        "import os, pathlib, sys, pgasdl\n"
        "with pgasdl.init(timeout=30) as ctx:\n"
        "    ctx.barrier()\n"
        "    print('out', sys.stdin.read())\n"
        "    pathlib.Path(f'rank{ctx.rank}').touch()\n"
    )
    line = f"exec {shlex.join(command('-n', '2', '-c', program))} {closed}"
    result = finished(["bash", "-c", line], env=environment(), cwd=tmp_path, timeout=60)
    assert (result.returncode, "Error" in result.stderr) == (0, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]
    lines = sorted(result.stdout.splitlines())
    assert lines == (["[0] out ", "[1] out "] if closed in ("<&-", "2>&-") else [])


def test_terminal_shows_a_live_line(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "def seen(what):\n"
        "    while not os.path.exists(os.path.join(sys.argv[1], what)): time.sleep(0.005)\n"
        "if os.environ['PGASDL_RANK'] == '0':\n"
        "    sys.stdout.write('\\r10%'); seen('ten')\n"
        "    sys.stdout.write('\\r60%'); seen('line'); print()\n"
        "else:\n"
        "    seen('sixty'); sys.stdout.write('li'); seen('part'); print('ne')\n"
    )
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command("-n", "2", "-c", program, str(tmp_path)), env=environment(), cwd="/",
        stdin=slave, stdout=slave, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    shown = b""
    marks = {b"10%": "ten", b"60%": "sixty", b"[1] li": "part", b"line\r\n[0] 60%": "line"}
    with contextlib.suppress(OSError):
        while data := os.read(master, 4096):
            shown += data
            for mark, name in marks.items():
                if mark in shown:
                    (tmp_path / name).touch()
    os.close(master)
    assert process.wait(15) == 0
    erase = rb"\r\x1b\[K"
    assert re.search(erase + rb"\[0\] 10%" + erase + rb"\[0\] 60%", shown), shown
    # The other rank's line appears above the bar, which is drawn again below it.
    assert re.search(erase + rb"\[1\] line\r\n\[0\] 60%", shown), shown
    assert re.search(rb"\[0\] 60%\r\npgasdl run: .*\r\n$", shown)
