"""Probes of the kernel and the container: each tries what it reports."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pgasdl.kernel import cgroup_limit, ptrace_scope, read_line, way_out
from pgasdl.tools.rdma import kernel_devices

_MIB = 1 << 20
_RESNET50_BYTES = 102_228_128
_CAP_IPC_LOCK = 14
_MEMBARRIER = {"x86_64": 324, "aarch64": 283}  # the system call's number
_PR_SET_PTRACER = 0x59616D61
_MEMBARRIER_GLOBAL_EXPEDITED = 1 << 1
_MEMBARRIER_REGISTER_GLOBAL_EXPEDITED = 1 << 2
_KERNEL_FIX = "Linux 5.4 or newer, and a container that does not filter this call"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One line of the report; ``status`` is OK, WARN or FAIL."""

    name: str
    status: str
    detail: str
    fix: str = ""


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def memfd(name: str) -> ProbeResult:
    """Make sealed memory and map it twice."""
    try:
        descriptor = os.memfd_create("pgasdl-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        text = f"memfd_create is refused: {error.strerror}; no job starts without"
        return ProbeResult(name, "FAIL", text, way_out("memfd_create"))
    with contextlib.closing(_Descriptor(descriptor)):
        os.ftruncate(descriptor, mmap.PAGESIZE)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as first, mmap.mmap(descriptor, 0) as second:
            first[0] = 7
            shared = second[0] == 7
        try:
            os.ftruncate(descriptor, 0)
        except PermissionError:
            if shared:
                return ProbeResult(name, "OK", "created, mapped twice, sealed against resizing")
    return ProbeResult(name, "FAIL", "memory is not shared, or its seals do not hold", _KERNEL_FIX)


def pidfd(name: str) -> ProbeResult:
    """Kill a process and wait for its descriptor."""
    with _child(signal.pause) as pid:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError as error:
            text = f"pidfd_open is refused: {error.strerror}; ranks look for the end of a peer in "
            text += "/proc every PGASDL_HEARTBEAT_MS"
            return ProbeResult(name, "WARN", text, way_out("pidfd_open"))
        with contextlib.closing(_Descriptor(descriptor)):
            started = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            noticed = bool(select.select([descriptor], [], [], 1.0)[0])
            elapsed = time.perf_counter() - started
    if noticed:
        return ProbeResult(
            name, "OK", f"the end of a killed process seen in {elapsed * 1e3:.1f} ms"
        )
    return ProbeResult(name, "FAIL", "the end of a killed process is not reported", _KERNEL_FIX)


def process_vm(name: str) -> ProbeResult:
    """Read a sibling's memory, as ranks do. Under Yama a parent may do more than a sibling."""
    scope = ptrace_scope() or "no Yama"
    for attempt, words in (
        (False, "between siblings"),
        (True, "where PR_SET_PTRACER names the common launcher"),
    ):
        error = _sibling_reads(allow=attempt)
        if error == 0:
            return ProbeResult(name, "OK", f"works {words} (ptrace_scope: {scope})")
    return ProbeResult(
        name,
        "WARN",
        f"refused: {os.strerror(error)} (ptrace_scope: {scope}); needed for ctx.bind only",
        "sysctl kernel.yama.ptrace_scope=1 (or 0); in docker --cap-add=SYS_PTRACE, or "
        + way_out("process_vm_readv"),
    )


def _sibling_reads(*, allow: bool) -> int:
    source = ctypes.create_string_buffer(b"pgasdl", 8)

    def wait_to_be_read() -> None:
        if allow:
            launcher = ctypes.c_ulong(os.getppid())
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, launcher, 0, 0, 0)
        os.write(ready[1], b"x")
        signal.pause()

    ready = os.pipe()
    with _child(wait_to_be_read) as owner:
        os.read(ready[0], 1)
        reader = os.fork()
        if reader == 0:
            os._exit(_read_from(owner, source))
        status = os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1])
    for descriptor in ready:
        os.close(descriptor)
    return status if status >= 0 else 1


def _read_from(owner: int, source: ctypes.Array[ctypes.c_char]) -> int:
    target = ctypes.create_string_buffer(8)
    libc = ctypes.CDLL(None, use_errno=True)
    here = _IoVec(ctypes.cast(target, ctypes.c_void_p).value, 8)
    there = _IoVec(ctypes.cast(source, ctypes.c_void_p).value, 8)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    arguments = (ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1))
    n = libc.process_vm_readv(owner, *arguments, ctypes.c_ulong(0))
    if n < 0:
        return ctypes.get_errno()
    return 0 if target.raw == source.raw else 255


def membarrier(name: str) -> ProbeResult:
    """Ask for the barrier that a sleeping rank needs."""
    result = _membarrier(_MEMBARRIER_REGISTER_GLOBAL_EXPEDITED)
    result = result or _membarrier(_MEMBARRIER_GLOBAL_EXPEDITED)
    if result == 0:
        return ProbeResult(name, "OK", "expedited")
    text = f"membarrier is refused: {os.strerror(-result)}; sleeping ranks wake more often"
    return ProbeResult(name, "WARN", text, way_out("membarrier"))


def memlock(name: str) -> ProbeResult:
    """Check the limit of pinned memory, against which registered memory counts."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ProbeResult(name, "OK", "unlimited")
    text = f"{soft / _MIB:g} MiB"
    if _may_lock_all():
        return ProbeResult(name, "OK", f"{text}, but CAP_IPC_LOCK lifts it")
    if not kernel_devices():
        return ProbeResult(name, "OK", f"{text} (matters with an RDMA device only)")
    text += (
        " for registered memory: segments and their notifications are pinned whole, "
        f"e.g. {_RESNET50_BYTES / _MIB:.0f} MiB of gradients of ResNet-50"
    )
    if soft > 2 * _RESNET50_BYTES:
        return ProbeResult(name, "OK", text)
    return ProbeResult(
        name,
        "WARN",
        text,
        "ulimit -l unlimited; in docker --ulimit memlock=-1, or as root --cap-add=IPC_LOCK",
    )


def _may_lock_all() -> bool:
    """Whether this process has CAP_IPC_LOCK, which counts in the first user namespace only."""
    first = (read_line("/proc/self/uid_map") or "").split() == ["0", "0", str(2**32 - 1)]
    for line in (read_line("/proc/self/status") or "").splitlines():
        if line.startswith("CapEff:"):
            return first and bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def nofile(name: str) -> ProbeResult:
    """Check the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    status = "OK" if soft >= 1024 else "WARN"
    return ProbeResult(
        name, status, f"{soft} (at most {hard})", "" if status == "OK" else "ulimit -n 65536"
    )


def memory(name: str) -> ProbeResult:
    """Check the available memory."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    available = int(fields["MemAvailable"].split()[0]) << 10
    limit = cgroup_limit()
    text = f"{available / _MIB:.0f} MiB available"
    text += f", cgroup limit {limit / _MIB:.0f} MiB" if limit else ", no cgroup limit"
    if min(available, limit or available) < 512 * _MIB:
        return ProbeResult(
            name, "WARN", text, "segments count as this cgroup's memory: raise its limit"
        )
    return ProbeResult(name, "OK", text)


class _Descriptor:
    """A descriptor that ``contextlib.closing`` can close."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        os.close(self._descriptor)


@contextlib.contextmanager
def _child(work: Callable[[], object]) -> Iterator[int]:
    """Fork a process that runs ``work``; kill and reap it at the end."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _membarrier(command: int) -> int:
    """Return the result, or minus errno."""
    number = _MEMBARRIER.get(platform.machine())
    if number is None:
        return -errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    longs = [ctypes.c_long(argument) for argument in (number, command, 0, 0)]
    result = int(libc.syscall(*longs))
    return -ctypes.get_errno() if result < 0 else result
