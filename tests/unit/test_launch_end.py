"""``pgasdl run``: statuses, signals, and that nothing is left behind."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import starting
from support.environment import environment
from support.launcher import command, run, running
from support.leftovers import alive, gone
from support.starting import finished, read_line

# How jobs end.


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("sys.exit(7)", 7, "ended with 7"),
        ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"),
    ],
)
def test_first_failure_decides_and_ends_the_others(end: str, status: int, words: str) -> None:
    program = (
        "import os, sys, time\n"
        f"if os.environ['PGASDL_RANK'] == '1': time.sleep(0.2); {end}\n"
        "try: time.sleep(60)\n"
        "finally: print('ended', flush=True)\n"
    )
    started = time.monotonic()
    result = run("-n", "3", "-c", program)
    assert result.returncode == status
    assert time.monotonic() - started < 10
    report = [line for line in result.stderr.splitlines() if line.startswith("pgasdl run:")]
    assert len(report) == 1
    assert re.search(rf"rank 1 \(process \d+\).*{words}.*other 2 ranks", report[0])


_FAILS = (
    "import atexit, os, sys, time, pgasdl\n"
    "with pgasdl.init() as ctx:\n"
    "    ctx.barrier()\n"
    "    if ctx.rank == 1:\n"
    "        atexit.register(time.sleep, 0.3)\n"  # rank 0 ends first
    "        {end}\n"
    "    ctx.notify_waitsome(ctx.segment(8))\n"
)


def _summary(stderr: str) -> str:
    (line,) = [line for line in stderr.splitlines() if line.startswith("pgasdl run: ")]
    return re.sub(r"\(process \d+\) ", "", line.removeprefix("pgasdl run: "))


@pytest.mark.parametrize(
    ("option", "end", "status", "words"),
    [
        ("--grace=4", "raise ValueError('mine')", 1, "rank 1 ended with 1: ValueError: mine"),
        ("--no-prefix", "raise ValueError('mine')", 1, "rank 1 ended with 1: ValueError: mine"),
        ("--keep-going", "raise ValueError('mine')", 1, "rank 1 ended with 1: ValueError: mine"),
        ("--grace=4", "os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL"),
        ("--no-prefix", "sys.exit(3)", 3, "rank 1 ended with 3$"),
        ("--grace=4", "sys.exit('no data')", 1, "rank 1 ended with 1: SystemExit: no data"),
        ("--grace=4", "sys.exit()", 1, "rank 0 .* PeerLostError: .*; rank 1 had ended with 0"),
    ],
)
def test_the_summary_names_the_rank_that_failed_first(
    option: str, end: str, status: int, words: str, tmp_path: Path
) -> None:
    """Not those that lost it and ended before it. The record of a wait goes to a file."""
    variables = {"TMPDIR": str(tmp_path), "PGASDL_LOG": "warning"}
    done = run("-n", "2", option, "-c", _FAILS.format(end=end), **variables)
    assert done.returncode == status
    assert re.search(words, _summary(done.stderr)), done.stderr
    assert words.startswith("rank 0") or "PeerLost" not in _summary(done.stderr)
    assert ("ctx.survivors()" in done.stderr) is (option == "--keep-going")
    (record,) = tmp_path.glob("pgasdl-*-rank-0.txt")
    assert (
        done.stderr.count("flight record") == done.stderr.count(f"flight record: {record}\n") == 1
    )
    assert "barrier" in record.read_text()


def test_an_error_that_a_loss_caused_is_not_the_first() -> None:
    """As of the backend of ``torch.distributed``, which raises PyTorch's own errors."""
    program = (
        "import pgasdl\n"
        "with pgasdl.init() as ctx:\n"
        "    ctx.barrier()\n"
        "    try: ctx.barrier() if ctx.rank == 0 else int('nine')\n"
        "    except pgasdl.PeerLostError as error: raise RuntimeError('late') from error\n"
    )
    done = run("-n", "2", "-c", program)
    assert "rank 1 ended with 1: ValueError: invalid literal" in _summary(done.stderr)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import nosuch", "rank . ended with 1: ModuleNotFoundError: No .*; rank . likewise"),
        ("x = = 1", "SyntaxError: invalid syntax; rank . likewise"),
        (
            "import os\nrank = os.environ['PGASDL_RANK']\nassert rank == '0', 'a'\nint('b')",
            "rank (0|1) ended with 1: (.*)rank (1|0) failed too: .*(AssertionError: a|Value)",
        ),
        (  # as PyTorch's hook prints it
            "import sys\nprint('[rank0]:   File \"x\"\\n[rank0]: KeyError: 7', file=sys.stderr)\n"
            "sys.exit(1)",
            "rank . ended with 1: KeyError: 7; rank . likewise",
        ),
    ],
)
def test_the_summary_has_an_exception_that_was_printed(program: str, words: str) -> None:
    done = run("-n", "2", "-c", program)
    assert re.search(words, _summary(done.stderr)), done.stderr


def test_a_program_without_init_is_told_of() -> None:
    for n, words in (
        (
            "2",
            "pgasdl run: no rank called pgasdl.init: 2 runs by themselves, unless they met through "
            "a store of torch.distributed or of their own\n",
        ),
        ("1", ""),
    ):
        assert run("-n", n, "-c", "pass").stderr == words


def test_survivors_may_report_before_they_are_ended(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "sys.stdin = open(sys.argv[1], 'rb' if os.environ['PGASDL_RANK'] == '0' else 'wb')\n"
        "if os.environ['PGASDL_RANK'] == '1': os._exit(3)\n"
        "sys.stdin.read()\n"  # until rank 1 has ended
        "time.sleep(0.2); sys.exit('I saw rank 1 go')\n"
    )
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = run("-n", "2", "-c", program, str(pipe))
    assert result.returncode == 3 and "[0] I saw rank 1 go" in result.stderr


def test_rank_that_ignores_sigterm_is_killed() -> None:
    program = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['PGASDL_RANK'] == '1': time.sleep(0.3); sys.exit(4)\n"
        "time.sleep(60)\n"
    )
    started = time.monotonic()
    assert run("-n", "2", "--grace", "0.3", "-c", program).returncode == 4
    assert time.monotonic() - started < 10


# Signals.

_SIGNALLED = (
    "import os, signal, sys, time\n"
    "signal.signal(signal.SIGUSR1, lambda *_: print('usr1', flush=True))\n"
    "signal.signal(signal.SIGUSR2, lambda *_: print('usr2', flush=True))\n"
    "try:\n"
    "    print('ready', flush=True)\n"
    "    time.sleep(60)\n"
    "except KeyboardInterrupt: print('interrupted', flush=True); raise\n"
)


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, None), (signal.SIGHUP, 129, None)],
)
def test_signals_reach_all_ranks(number: int, status: int, said: str | None) -> None:
    with running("-n", "2", "-c", _SIGNALLED) as process:
        assert sorted(read_line(process)[4:] for _ in range(2)) == ["ready\n"] * 2
        for told, word in ((signal.SIGUSR1, "usr1\n"), (signal.SIGUSR2, "usr2\n")):
            process.send_signal(told)
            assert sorted(read_line(process)[4:] for _ in range(2)) == [word, word]
        process.send_signal(number)
        if said:
            expected = [f"[0] {said}\n", f"[1] {said}\n"]
            assert sorted(read_line(process) for _ in range(2)) == expected
        assert process.wait(15) == status


def test_a_signal_ends_the_wait_for_a_reader() -> None:
    """Without one it has no end: a reader that pauses gets all of the output."""
    with running("-n", "1", "-c", "print('x\\n' * 99999)") as process:
        read_line(process)
        launcher = _launcher_of(process.pid)
        children = Path(f"/proc/{launcher}/task/{launcher}/children")
        while children.read_text():
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 143


def test_a_signal_that_the_caller_ignores_stays_ignored() -> None:
    """As SIGHUP under nohup, whose terminal goes away."""
    caller = f"trap '' HUP; exec {shlex.join(command('-n', '1', '-c', _SIGNALLED))}"
    with starting.running(["bash", "-c", caller], env=environment()) as process:
        read_line(process)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGUSR1)
        assert read_line(process) == "[0] usr1\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 143


def test_flight_record_signal_kills_no_rank_that_does_not_know_it() -> None:
    program = "import time; print('ready', flush=True); time.sleep(0.5)"
    with running("-n", "1", "-c", program) as process:
        read_line(process)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(15) == 0


# Nothing is left behind.

_WITH_CHILDREN = (
    "import os, subprocess, sys, time\n"
    "a = subprocess.Popen(['sleep', '300'])\n"
    "b = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
    "sys.stdout.write(f'{os.getpid()} {a.pid} {b.pid}\\n')\n"
)


def _pids(process: subprocess.Popen[str], n: int) -> list[int]:
    return [int(word) for _ in range(n) for word in read_line(process).split()[1:]]


def _launcher_of(guard: int) -> int:
    return int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])


@pytest.mark.parametrize("victim", ["guard", "launcher"])
def test_kill_of_the_launcher_leaves_no_process(victim: str) -> None:
    with running("-n", "2", "-c", _WITH_CHILDREN + "time.sleep(300)") as process:
        pids = _pids(process, 2)
        pids += [process.pid, _launcher_of(process.pid)]
        assert len(pids) == 8 and all(alive(pid) for pid in pids)
        os.kill(pids[6] if victim == "guard" else pids[7], signal.SIGKILL)
        assert gone(pids)
        assert process.wait(5) == (-9 if victim == "guard" else 137)


def test_kill_of_a_rank_takes_what_it_started() -> None:
    with running("-n", "2", "--grace", "1", "-c", _WITH_CHILDREN + "time.sleep(300)") as process:
        pids = _pids(process, 2)
        os.kill(pids[3], signal.SIGKILL)
        assert process.wait(15) == 137
        assert gone(pids)


def test_daemons_of_a_good_job_end_with_it() -> None:
    with running("-n", "2", "-c", _WITH_CHILDREN) as process:
        pids = _pids(process, 2)
        assert process.wait(15) == 0
        assert gone(pids)


def test_a_daemon_that_writes_without_end_ends_with_its_rank() -> None:
    program = "import subprocess; subprocess.Popen(['yes'], start_new_session=True)"
    assert run("-n", "1", "-c", program, timeout=20).returncode == 0


def test_a_caller_that_ignores_the_end_of_children_waits_for_them() -> None:
    """Some supervisors ignore SIGCHLD; then no signal would ever say that a rank has ended."""
    caller = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    for code in (0, 3):
        program = f"import os, signal; print(signal.getsignal(signal.SIGCHLD)); os._exit({code})"
        result = finished(
            [sys.executable, "-c", caller, *command("-n", "2", "-c", program)],
            env=environment(),
            timeout=60,
        )
        assert result.returncode == code, result.stderr


@pytest.mark.parametrize("limit", [8, 12, 16])
def test_too_few_descriptors_are_told_in_a_line(limit: int) -> None:
    caller = (
        "import os, resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    result = finished(
        [sys.executable, "-c", caller, *command("-n", "4", "-c", "pass")],
        env=environment(),
        timeout=60,
    )
    assert result.returncode == 1
    assert "Too many open files" in result.stderr and "Traceback" not in result.stderr


def test_two_jobs_at_once_do_not_meet() -> None:
    program = (
        "import os, sys, numpy, pgasdl\n"
        "secret = os.pread(int(os.environ['PGASDL_SECRET_FD']), 32, 0)\n"
        "with pgasdl.init(timeout=50) as ctx:\n"
        "    array = numpy.full(8, 1.0, 'f4')\n"
        "    ctx.allreduce(array, 'sum')\n"
        "    shown = [kept for bare in (secret, ctx._job.store.token)\n"
        "             for kept in (bare, bare.hex().encode())]\n"
        "    words = b''.join(open(f'/proc/self/{name}', 'rb').read()\n"
        "                     for name in ('environ', 'cmdline'))\n"
        "    assert len(secret) == 32 and not any(word in words for word in shown)\n"
        "    sys.stdout.write(f'{array[0]:g} {ctx._job.store.token.hex()}\\n')\n"
    )
    tokens = set()
    with running("-n", "2", "-c", program) as one, running("-n", "3", "-c", program) as other:
        for process, n in ((one, 2), (other, 3)):
            output, problems = process.communicate(timeout=60)
            assert process.returncode == 0, problems
            words = [line.split()[1:] for line in output.splitlines()]
            assert [word[0] for word in words] == [str(n)] * n
            assert len({word[1] for word in words}) == 1
            tokens.add(words[0][1])
    assert len(tokens) == 2


def test_descriptors_and_signal_state_of_a_rank() -> None:
    """A rank gets the three standard streams and the secret, and no blocked signal."""
    program = (
        "import os, signal\n"
        "fds = sorted(int(f) for f in os.listdir('/proc/self/fd'))\n"
        "extra = [f for f in fds if f > 2 and f != int(os.environ['PGASDL_SECRET_FD'])]\n"
        "print(len(extra), signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
    )
    # The one extra descriptor is that which lists the directory.
    assert run("-n", "1", "-c", program).stdout == "[0] 1 set()\n"


# Called from Python.

_CALLER = """
import ctypes, os, signal, subprocess, sys
from pgasdl.runtime.launch.run import LocalJob, run

def state():
    reaper = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(reaper), 0, 0, 0)
    return signal.pthread_sigmask(signal.SIG_BLOCK, ()), reaper.value

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
mine = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
ended = subprocess.Popen(["sh", "-c", "exit 7"])
before = state()
status = run(LocalJob(["-c", sys.argv[1]], 2, os.environ))
assert state() == before, (state(), before)
assert mine.poll() is None, mine.returncode
mine.stdin.close()
print(status, mine.wait(30), ended.wait(30))
"""


@pytest.mark.parametrize(
    ("program", "status"),
    [("pass", 0), ("raise SystemExit(5)", 5), ("import os; os.kill(os.getppid(), 9)", 137)],
)
def test_a_caller_from_python_stays_what_it_was(program: str, status: int) -> None:
    """It keeps the signals that it blocks, and its own children, running and ended."""
    done = finished([sys.executable, "-c", _CALLER, program], env=environment(), timeout=60)
    assert done.stdout == f"{status} 0 7\n", done.stderr
