"""``pgasdl run``: N ranks on this machine, their store, output, signals and end."""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from pgasdl.config import Config, format_value
from pgasdl.errors import BootstrapError, ConfigError
from pgasdl.runtime.bootstrap import StoreServer
from pgasdl.runtime.bootstrap.rendezvous import sealed_secret
from pgasdl.runtime.launch.guard import TOLD, forwarded, guarded, kill_descendants, signal_name
from pgasdl.runtime.launch.output import MAX_KEPT, Multiplexer, Stream

_LOG = logging.getLogger("pgasdl.runtime.launch")
_SHIM = str(Path(__file__).with_name("shim.py"))
_REPORT_SECONDS = 1.0  # for the survivors to report the loss, before SIGTERM
_LONGEST_REASON = 300


@dataclass(frozen=True, slots=True)
class LocalJob:
    """A job to run.

    ``program`` : arguments of Python: a file, ``-m module`` or ``-c code``, and the program's own.
    A leading ``-P`` keeps Python from searching the current folder for modules. Every module of
    this package that is run has it, since in a clone the source folder lies there.
    ``environ`` : variables of the ranks, without each one's place
    ``prefix`` : put ``[rank]`` before each line; otherwise the ranks write to our outputs
    themselves
    ``grace`` : seconds between SIGTERM and SIGKILL
    ``keep_going`` : when a rank fails, the others run on, for programs that survive losses
    """

    program: Sequence[str]
    n_ranks: int
    environ: Mapping[str, str]
    prefix: bool = True
    grace: float = 5.0
    keep_going: bool = False


def inherited() -> dict[str, str]:
    """Return this process's variables without what a job that started it may have set."""
    own = ["PGASDL_RANK", "PGASDL_LOCAL_RANK", "PGASDL_SECRET_FD", "PGASDL_KEEP_GOING"]
    own += ["PGASDL_JOB_LINK"] * ("PGASDL_RANK" in os.environ)  # the server's job is around us
    return {name: text for name, text in os.environ.items() if name not in own}


def check(job: LocalJob) -> Config:
    """Raise ConfigError for a job that cannot work, before anything starts."""
    if job.n_ranks < 1:
        raise ConfigError(f"-n {job.n_ranks}: at least one rank")
    program = list(job.program)
    if program[:1] == ["-P"]:
        del program[0]
    if not program:
        raise ConfigError("no program: give a file, -m MODULE or -c CODE")
    first = program[0]
    if first in ("-m", "-c"):
        if len(program) < 2:
            raise ConfigError(f"{first} needs {'a module' if first == '-m' else 'code'}")
    elif not os.path.exists(first):
        folder, name = os.path.split(first)
        with contextlib.suppress(OSError):
            if near := difflib.get_close_matches(name, os.listdir(folder or "."), n=1):
                raise ConfigError(f"no such program: {first}; did you mean {near[0]}?")
        raise ConfigError(f"no such program: {first}")
    elif os.path.isdir(first) and not os.path.exists(os.path.join(first, "__main__.py")):
        raise ConfigError(f"{first} is a directory without __main__.py")
    elif not os.access(first, os.R_OK):
        raise ConfigError(f"{first} cannot be read")
    return Config.from_environment(job.environ)


def run(job: LocalJob) -> int:
    """Run the job to its end and return the exit status for the shell.

    The status is 0 if every rank ended with 0, else that of the first that failed, and not only
    because it lost another: 128 plus the signal's number if it was killed. Call it from a process
    without threads: it forks. ConfigError says why the job cannot work; UnavailableError, what this
    machine refuses.
    """
    check(job)
    secret = secrets.token_bytes(32)
    descriptor = sealed_secret(secret)
    # Some supervisors leave it ignored; then no signal reports the end of a child.
    ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        return guarded(lambda abandoned: _Launcher(job, abandoned).run(secret, descriptor))
    finally:
        os.close(descriptor)
        if ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)


class _Rank:
    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process
        self.status = 0
        self.reason = ""  # its exception, in a line
        self.errors: Stream | None = None

    def how_ended(self) -> int | None:
        """Return CLD_EXITED, CLD_KILLED ... for a zombie, without reaping it; None: it runs."""
        how = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        return None if how is None else how.si_code

    @property
    def lost_another(self) -> bool:
        """It failed because another rank did."""
        return self.reason.startswith("PeerLostError")

    def signal(self, number: int) -> None:
        """Signal the rank and its processes; by those of ``TOLD`` only it: they kill the others."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                if number in TOLD:
                    os.kill(self.process.pid, number)
                else:
                    os.killpg(self.process.pid, number)


class _Launcher:
    def __init__(self, job: LocalJob, abandoned: Callable[[], bool]) -> None:
        self._job = job
        self._abandoned = abandoned
        self._output = Multiplexer()
        self._server: StoreServer
        self._selector = selectors.PollSelector()  # epoll refuses regular files
        self._ranks: list[_Rank] = []
        self._running: dict[int, _Rank] = {}
        self._look_at_ranks = False
        self._signals: list[int] = []
        self._n_interrupts = 0
        self._interrupted_at = 0.0
        self._terminate_at: float | None = None
        self._kill_at: float | None = None
        self._status = 0
        self._ended_well: list[int] = []
        self._failed: list[_Rank] = []  # in the order of their ends, until they were reported
        self._reading: dict[int, tuple[Stream, _Rank, IO[bytes]]] = {}
        self._paused = False
        self._lost_output = False

    def run(self, secret: bytes, descriptor: int) -> int:
        job_id = secrets.token_hex(8)
        try:
            self._catch_signals()
            server = StoreServer(secret, self._job.n_ranks, job_id=job_id)
        except (BootstrapError, OSError) as error:
            self._output.message(f"pgasdl run: error: {error}")
            self._status = 1
        else:
            self._server = server
            with server:
                self._start_all(job_id, format_value(server.address), descriptor)
                while self._running:
                    self._turn()
                self._report()
        while any(sink.kept for sink in self._output.sinks):  # until it is read, or a signal comes
            self._turn()
        return self._status

    def _start_all(self, job_id: str, store: str, descriptor: int) -> None:
        try:
            shared = self._environment(job_id, store, descriptor)
            for rank in range(self._job.n_ranks):
                self._start(rank, shared, descriptor)
        except OSError as error:
            self._output.message(f"pgasdl run: cannot start rank {len(self._ranks)}: {error}")
            self._status = 1
            self._end_all(signal.SIGKILL)
        finally:
            os.close(descriptor)

    def _environment(self, job_id: str, store: str, descriptor: int) -> dict[str, str]:
        n = self._job.n_ranks
        environ = dict(self._job.environ)
        environ.pop("PGASDL_SECRET_FILE", None)
        environ |= {
            "PGASDL_SIZE": str(n),
            "PGASDL_LOCAL_SIZE": str(n),
            "PGASDL_JOB_ID": job_id,
            "PGASDL_STORE": store,
            "PGASDL_SECRET_FD": str(descriptor),
            "PGASDL_KEEP_GOING": str(int(self._job.keep_going)),
        }
        if "OMP_NUM_THREADS" not in environ:
            n_threads = max(1, len(os.sched_getaffinity(0)) // n)
            environ["OMP_NUM_THREADS"] = str(n_threads)
            _LOG.debug("OMP_NUM_THREADS=%d for each of %d ranks", n_threads, n)
        return environ

    def _start(self, rank: int, shared: dict[str, str], descriptor: int) -> None:
        place = {"PGASDL_RANK": str(rank), "PGASDL_LOCAL_RANK": str(rank)}
        python = sys.executable
        pipe = subprocess.PIPE if self._job.prefix else None
        process = subprocess.Popen(
            [python, "-I", "-S", _SHIM, str(os.getpid()), python, "-u", *self._job.program],
            env=shared | place,
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
            # Its own session: only we pass on the terminal's Ctrl-C, and rank 0 may read from the
            # terminal although it is not in the foreground group.
            start_new_session=True,
            pass_fds=(descriptor,),
        )
        entry = _Rank(rank, process)
        self._ranks.append(entry)
        self._running[rank] = entry
        for file, error in ((process.stdout, False), (process.stderr, True)):
            if file is not None:
                os.set_blocking(file.fileno(), False)
                stream = self._output.stream(rank, self._job.n_ranks, error=error)
                self._reading[file.fileno()] = (stream, entry, file)
                entry.errors = stream
                self._watch(file.fileno())

    def _watch(self, descriptor: int) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, lambda: self._read(descriptor))

    def _turn(self) -> None:
        self._keep_pace()
        events = self._selector.select(self._patience())
        for key, mask in events:
            if mask & selectors.EVENT_READ:
                key.data()
        self._end_zombies()
        self._handle_signals()
        self._handle_deadlines()
        for sink in self._output.sinks:
            sink.flush_some()
            if sink.error:
                self._cannot_write(sink.error)

    def _cannot_write(self, error: OSError) -> None:
        """End the ranks, once; a reader that went away is no error to report."""
        if self._lost_output:
            return
        self._lost_output = True
        if self._kill_at is None:
            self._terminate_at = time.monotonic()
        if isinstance(error, BrokenPipeError):
            self._status = self._status or 128 + signal.SIGPIPE
        else:
            self._status = self._status or 1
            self._output.message(f"pgasdl run: error: cannot write output: {error.strerror}")

    def _keep_pace(self) -> None:
        for sink in self._output.sinks:
            registered = sink.descriptor in self._selector.get_map()
            if sink.kept and not registered:
                self._selector.register(sink.descriptor, selectors.EVENT_WRITE)
            elif registered and not sink.kept:
                self._selector.unregister(sink.descriptor)
        if self._output.congested != self._paused:
            self._paused = not self._paused
            for descriptor in self._reading:
                if self._paused:
                    self._selector.unregister(descriptor)
                else:
                    self._watch(descriptor)

    def _patience(self) -> float | None:
        moments = [moment for moment in (self._terminate_at, self._kill_at) if moment is not None]
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _read(self, descriptor: int) -> None:
        if descriptor not in self._reading:
            return
        stream = self._reading[descriptor][0]
        try:
            data = os.read(descriptor, MAX_KEPT)  # all that a pipe holds
        except BlockingIOError:
            return
        if data:
            self._output.feed(stream, data)
        else:
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        stream, _, file = self._reading.pop(descriptor)
        self._output.end(stream)
        if not self._paused:
            self._selector.unregister(descriptor)
        file.close()

    def _end_zombies(self) -> None:
        if not self._look_at_ranks:
            return
        self._look_at_ranks = False
        zombies = [(how, entry) for entry in self._running.values() if (how := entry.how_ended())]
        # If several ended in one turn, a killed one is more likely the cause.
        for _, entry in sorted(zombies, key=lambda zombie: zombie[0] == os.CLD_EXITED):
            self._ended(entry)

    def _ended(self, entry: _Rank) -> None:
        """End the processes of a rank that is a zombie; read its last output and its status."""
        del self._running[entry.rank]
        # Its number is not reused before it is reaped, so this reaches its own group only.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(entry.process.pid, signal.SIGKILL)
        entry.status = entry.process.wait()
        for descriptor in [d for d, (_, owner, _) in self._reading.items() if owner is entry]:
            self._read(descriptor)
            if descriptor in self._reading:  # a process that it has left behind writes on
                self._close(descriptor)
        if entry.status == 0:
            self._ended_well.append(entry.rank)
        elif self._status == 0:
            entry.reason = self._reason(entry)
            self._failed.append(entry)
        self._server.ended(entry.rank)
        if entry.status == 0 or self._status != 0:
            return
        if self._job.keep_going:
            if not entry.lost_another:
                self._report()
        elif self._running and self._terminate_at is None and self._kill_at is None:
            self._terminate_at = time.monotonic() + _REPORT_SECONDS

    def _reason(self, entry: _Rank) -> str:
        """Return the exception that ended a rank: as it has told the store, or has printed."""
        reason = self._server.reason(entry.rank)
        if not reason and entry.status == 1 and entry.errors:  # as after an exception
            reason = entry.errors.raised.decode(errors="replace").removeprefix("pgasdl.errors.")
        return "" if reason == f"SystemExit: {entry.status}" else reason[:_LONGEST_REASON]

    def _report(self) -> None:
        """Name the rank that failed first, in a line; one that only lost another did not."""
        n = self._job.n_ranks
        if self._status == 0 and n > 1 and len(self._ended_well) == n and not self._server.came:
            self._output.message(
                f"pgasdl run: no rank called pgasdl.init: {n} runs by themselves, unless they met "
                "through a store of torch.distributed or of their own"
            )
        if not self._failed or self._status != 0:
            return
        first = min(self._failed, key=lambda entry: entry.lost_another)
        self._status = first.status if first.status > 0 else 128 - first.status
        how = f"ended with {first.status}" + (first.reason and f": {first.reason}")
        if first.status < 0:
            how = f"was killed by {signal_name(-first.status)}"
        words = f"pgasdl run: rank {first.rank} (process {first.process.pid}) {how}"
        if first.lost_another and self._ended_well:
            words += f"; rank {', '.join(map(str, self._ended_well))} had ended with 0"
        alike: dict[str, list[str]] = {}
        for entry in self._failed:
            if entry is not first and not entry.lost_another:
                alike.setdefault(entry.reason, []).append(str(entry.rank))
        for reason, ranks in alike.items():
            why = "failed too" + (reason and f": {reason[: _LONGEST_REASON // 3]}")
            why = "likewise" if reason == first.reason else why
            words += f"; rank {', '.join(ranks)} {why}"
        if self._running:
            n = len(self._running)
            ending = "leaving alone" if self._job.keep_going else "ending"
            words += f"; {ending} the other {n} rank{'s' if n > 1 else ''}"
        self._output.message(words)

    def _catch_signals(self) -> None:
        self._wake, wake = os.pipe()
        for descriptor in (self._wake, wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signals = forwarded()
        for number in signals:
            signal.signal(number, self._note_signal)
        # It wakes the loop. A pidfd per rank would, too, but is not available everywhere.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._wake, selectors.EVENT_READ, self._drain_wake)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        self._look_at_ranks = True

    def _handle_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGTERM and self._abandoned():
                # The guard was killed: end everything at once.
                self._end_all(signal.SIGKILL)
                kill_descendants()
                os._exit(137)
            if number == signal.SIGINT:
                self._interrupt()
            else:
                self._end_all(number)
            if not self._running and number not in TOLD:
                self._status = self._status or 128 + number
                for sink in self._output.sinks:
                    sink.kept.clear()
            if number in (signal.SIGTERM, signal.SIGHUP):
                self._kill_at = self._kill_at or time.monotonic() + self._job.grace

    def _interrupt(self) -> None:
        """Handle Ctrl-C: the first goes to the ranks, the second ends and the third kills them."""
        now = time.monotonic()
        if now - self._interrupted_at < 0.2:
            return  # sent to the process group: we got it, and the guard's copy of it
        self._interrupted_at = now
        self._n_interrupts += 1
        if self._n_interrupts == 1:
            self._end_all(signal.SIGINT)
        elif self._n_interrupts == 2:
            self._terminate_at = now
        else:
            self._kill_at = now

    def _handle_deadlines(self) -> None:
        now = time.monotonic()
        if self._terminate_at is not None and now >= self._terminate_at:
            self._terminate_at = None
            self._report()
            self._kill_at = self._kill_at or now + self._job.grace
            self._end_all(signal.SIGTERM)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + 1.0
            self._end_all(signal.SIGKILL)

    def _end_all(self, number: int) -> None:
        for entry in self._running.values():
            entry.signal(number)
