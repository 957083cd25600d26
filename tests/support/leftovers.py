"""Leftover processes: whether one is still alive, and waiting until none is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from support.patience import until


def alive(pid: int) -> bool:
    """Whether the process runs: a zombie does not."""
    return state_of(pid) not in "ZX"


def state_of(pid: int) -> str:
    """The kernel's letter for what the process does; "X": there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return stat.rsplit(")", 1)[1].split()[0]


def sockets_of(pid: int) -> set[str]:
    """The inodes of its sockets, as the tables of /proc/net have them."""
    found = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found.add(os.readlink(entry.path).removeprefix("socket:[").removesuffix("]"))
    return found


def listening(pid: int) -> list[int]:
    """The ports on which it listens at all addresses, as anybody on the machine can find them."""
    inodes, ports = sockets_of(pid), []
    for table in ("tcp6", "tcp"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            address, number = words[1].split(":")
            if words[3] == "0A" and not int(address, 16) and words[9] in inodes:
                ports.append(int(number, 16))
    return ports


def gone(pids: Iterable[int]) -> bool:
    """Wait for processes to end; False if one still runs after all patience."""
    pids = list(pids)
    return until(lambda: not any(alive(pid) for pid in pids))
