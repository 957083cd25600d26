"""What the kernel allows, for those who have to say so. Needs the standard library only."""

from __future__ import annotations

import contextlib
from pathlib import Path


def way_out(call: str) -> str:
    """Say how a system call that a sandbox or an old kernel refuses can be allowed."""
    return (
        f"allow it where this runs (docker: --security-opt seccomp=unconfined or a profile with "
        f"{call}; systemd: SystemCallFilter={call}), or use a newer kernel"
    )


def ptrace_scope() -> str | None:
    """Tell whom Yama lets reach memory: "0" its user, "1" ancestors and whom a process names."""
    return read_line("/proc/sys/kernel/yama/ptrace_scope")


def read_line(path: str) -> str | None:
    """Return what a file of ``/proc`` or ``/sys`` holds, stripped of white space; None: no file."""
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return None
