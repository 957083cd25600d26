"""Questions to the kernel: what it allows. Needs the standard library only."""

from __future__ import annotations

import contextlib
from pathlib import Path


def way_out(call: str) -> str:
    """Return how to allow a system call that a sandbox or an old kernel refuses."""
    return (
        f"allow it where this runs (docker: --security-opt seccomp=unconfined or a profile with "
        f"{call}; systemd: SystemCallFilter={call}), or use a newer kernel"
    )


def ptrace_scope() -> str | None:
    """Return whom Yama lets reach memory: "0" its user, "1" ancestors and named processes."""
    return read_line("/proc/sys/kernel/yama/ptrace_scope")


def read_line(path: str) -> str | None:
    """Return the text of a file of ``/proc`` or ``/sys``, without white space; None: no file."""
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return None
