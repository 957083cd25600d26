"""Runs commands in guests that have an RDMA device, on a machine that has none.

A guest is a User Mode Linux kernel, one ordinary process, with the drivers of Soft-RoCE inside. It
sees the host's own file tree, read-only under a layer of its own in memory, so programs and
environments run in it as they are. `run` boots one guest for one command, `run_pair` two joined
by a cable; both wait for the end and leave nothing behind. `missing` says what a machine lacks.

In a guest the environment holds PATH, HOME, what the caller gives, and
SOFTROCE_DEVICE, SOFTROCE_GID_INDEX: the verbs device, and its entry for RoCE v2 over IPv4;
SOFTROCE_ADDRESS, SOFTROCE_GUEST: this guest's own IPv4 address, and its number from 1.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import kernel
from machine import TIMED_OUT, VANISHED, Machine, Result, attend

__all__ = ["TIMED_OUT", "VANISHED", "Result", "missing", "require", "run", "run_pair"]

Command = str | Sequence[str]
OnOutput = Callable[[int, bytes], None]

MODES = ("dummy", "rails", "veth", "cables")
DRIVERS = ("rxe", "siw")
PROGRAMS = {  # programs that guests need, and the Debian packages that have them
    "prlimit": "util-linux",
    "setpriv": "util-linux",
    "busybox": "busybox-static",
    "ip": "iproute2",
    "rdma": "iproute2",
    "tc": "iproute2",
    "ibv_devinfo": "ibverbs-utils",
    "ib_write_bw": "perftest",
}
RXE_LIBRARY = Path("/etc/libibverbs.d/rxe.driver")
_MIB = 1 << 20
_CABLE_BYTES = 4 * _MIB  # of packets that a cable between two guests holds
_SYSTEM_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def missing() -> list[str]:
    """The things that this machine lacks to run guests, each as one sentence; empty when it can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return [f"soft-RoCE guests need Linux on x86_64, this is {platform.platform()}"]
    lacks = [
        f"no program {program} (package {package})"
        for program, package in PROGRAMS.items()
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:{_SYSTEM_FOLDERS}") is None
    ]
    if not RXE_LIBRARY.exists():
        lacks.append("no verbs library for rxe (package ibverbs-providers)")
    if not kernel.path().exists():
        lacks.append("soft-RoCE guest kernel not built: run python tests/softroce/kernel.py")
    return lacks


def require() -> None:
    """Skip the calling test where guests cannot run; fail it where ``CI`` is ``true``."""
    import pytest

    if lacks := missing():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("; ".join(lacks))


def run(
    command: Command,
    *,
    env: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    writable: Sequence[str | os.PathLike[str]] = (),
    mode: str = "dummy",
    driver: str = "rxe",
    loss: float = 0.0,
    memory: int = 2048 * _MIB,
    cpus: int = 2,
    hold: int = 0,
    timeout: float = 120.0,
    on_output: OnOutput | None = None,
) -> Result:
    """Boot one guest, run ``command`` in it, and return the result.

    Parameters
    ----------
    command : an argument vector, or one string for a shell
    env : environment variables to add
    directory : where the command runs; None: the current directory
    writable : folders of the host in which the guest's changes persist
    mode : "dummy": one device, rxe0, whose packets loop back inside the driver;
        "rails": two of that kind, rxe0 and rxe1, each on a link of its own;
        "veth": rxe0 and rxe1 at the ends of a cable, on which packets travel and can be lost;
        "cables": the same, and rxe2 and rxe3 at the ends of another one
    driver : "rxe", or "siw" for iWARP: connections by rdma_cm only, no atomics
    loss : percent of the packets lost on each end of the cables of "veth" and "cables"
    memory : bytes the guest sees; the host gives them as they are touched
    cpus : virtual processors, 1 to 8
    hold : microseconds for which the kernel is held between the two stores of each word that it
        copies (hold.c); the console's last line tells how often that was
    timeout : seconds, boot included, after which the guest is ended
    on_output : called with the guest's number and each piece of output as it comes

    Returns
    -------
    The exit status and the output, standard error mixed in. The status is `TIMED_OUT` when time
    ran out, and `VANISHED` when the guest ended without one, as it does when it is powered off.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}: one of {', '.join(MODES)}")
    if loss and mode not in ("veth", "cables"):
        raise ValueError(f"nothing can be lost in mode {mode}: no packet travels")
    machine = Machine(
        1,
        _job(command, env, directory),
        _settings(1, mode, driver, loss, writable),
        memory=memory,
        cpus=cpus,
        hold=hold,
    )
    return attend([machine], timeout, on_output)[0]


def run_pair(
    commands: tuple[Command, Command],
    *,
    env: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    writable: Sequence[str | os.PathLike[str]] = (),
    driver: str = "rxe",
    loss: float = 0.0,
    memory: int = 2048 * _MIB,
    cpus: int = 2,
    timeout: float = 120.0,
    on_output: OnOutput | None = None,
) -> tuple[Result, Result]:
    """Boot two guests as two hosts on a private cable, and run one command on each.

    They are guest1 (10.77.2.1) and guest2 (10.77.2.2), for verbs and for TCP alike, and have
    nothing else in common but the host's tree; ``loss`` percent of the packets are lost each
    way. The commands begin when both hosts are up, and each host lives as long as its command: no
    command may end while the other still needs its host. The rest is as for `run`.
    """
    cable = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    machines = []
    try:
        for number, (command, end) in enumerate(zip(commands, cable, strict=True), 1):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, _CABLE_BYTES)
            job = _job(command, env, directory)
            settings = _settings(number, "link", driver, loss, writable)
            machines.append(
                Machine(number, job, settings, memory=memory, cpus=cpus, cable=end.fileno())
            )
        first, second = attend(machines, timeout, on_output)
    finally:
        for end in cable:
            end.close()
    return first, second


def _job(
    command: Command, env: Mapping[str, str] | None, directory: str | os.PathLike[str] | None
) -> str:
    """The shell script that the guest runs."""
    variables = {
        "PATH": f"{os.environ.get('PATH', '')}:{_SYSTEM_FOLDERS}",
        "HOME": os.environ.get("HOME", "/root"),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        **(env or {}),
    }
    line = command if isinstance(command, str) else f"exec {shlex.join(command)}"
    where = shlex.quote(os.path.abspath(directory or Path.cwd()))
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join([*exports, f"cd {where} || exit 125", line, ""])


def _settings(
    guest: int,
    mode: str,
    driver: str,
    loss: float,
    writable: Sequence[str | os.PathLike[str]],
) -> str:
    """The settings that init.sh reads before anything else, as shell assignments."""
    if driver not in DRIVERS:
        raise ValueError(f"driver {driver!r}: one of {', '.join(DRIVERS)}")
    if not 0 <= loss <= 100:
        raise ValueError(f"loss {loss}: a percentage")
    folders = [os.path.abspath(folder) for folder in writable]
    for folder in folders:
        if not os.path.isdir(folder):
            raise ValueError(f"writable {folder!r} is not a folder")
        if "," in folder:
            raise ValueError(f"writable {folder!r}: mount takes no commas in a path")
    settings = {
        "GUEST": str(guest),
        "MODE": mode,
        "DRIVER": driver,
        "LOSS": f"{loss:g}",
        "WRITABLE": "\n".join(folders),
        "CPU_MHZ": _clock_rate(),
    }
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items())


def _clock_rate() -> str:
    """The host's first processor, in MHz, as its kernel writes it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("cpu MHz"):
            return line.partition(":")[2].strip()
    return "1000.000"
