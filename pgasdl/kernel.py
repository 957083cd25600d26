"""Questions to the kernel about permissions and limits. Needs the standard library only."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path


def way_out(call: str) -> str:
    """Return how to allow a system call that a sandbox or an old kernel refuses."""
    return (
        f"allow it where this runs (docker: --security-opt seccomp=unconfined or a profile with "
        f"{call}; systemd: SystemCallFilter={call}), or use a newer kernel"
    )


def ptrace_scope() -> str | None:
    """Return Yama's rule for reading memory: "0" same user, "1" ancestors and named processes."""
    return read_line("/proc/sys/kernel/yama/ptrace_scope")


def read_line(path: str) -> str | None:
    """Return the text of a file of ``/proc`` or ``/sys``, without white space; None: no file."""
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return None


def cgroup_limit() -> int | None:
    """Return the smallest memory limit of our cgroup and those above it; None: no limit."""
    limits = []
    for line in (read_line("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = Path("/sys/fs/cgroup" if not controllers else "/sys/fs/cgroup/memory")
        file = "memory.max" if not controllers else "memory.limit_in_bytes"
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            text = read_line(str(place / file)) or ""
            if text.isdecimal() and int(text) < 1 << 60:
                limits.append(int(text))
            if place == root:
                break
    return min(limits, default=None)


@functools.cache
def memory_limit() -> int:
    """Return the bytes of memory that a process can ever have: the machine's, or its cgroup's."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, cgroup_limit() or machine)


def looks_like_others() -> bool:
    """Whether this user's number is the one that a user namespace shows for all unknown users."""
    overflow = read_line("/proc/sys/kernel/overflowuid") or "65534"
    mapped = (read_line("/proc/self/uid_map") or "").split()
    return str(os.geteuid()) == overflow and mapped != ["0", "0", str(2**32 - 1)]
