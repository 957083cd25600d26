"""What the kernel and this container allow: each probe does the thing it reports on."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import resource
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pgasdl.topo import kernel_devices

_MIB = 1 << 20
_RESNET50_BYTES = 102_228_128
_CAP_IPC_LOCK = 14
_SYSCALLS = {
    "x86_64": {"membarrier": 324, "futex": 202},
    "aarch64": {"membarrier": 283, "futex": 98},
}
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_MEMBARRIER_PRIVATE_EXPEDITED = 1 << 3
_MEMBARRIER_REGISTER_PRIVATE_EXPEDITED = 1 << 4
_FUTEX_WAKE = 1
_KERNEL_FIX = "Linux 5.4 or newer, and a container that does not filter this call"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``status`` is OK, WARN or FAIL."""

    name: str
    status: str
    detail: str
    fix: str = ""


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def memfd(name: str) -> Finding:
    descriptor = os.memfd_create("pgasdl-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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
                return Finding(name, "OK", "created, mapped twice, sealed against resizing")
    return Finding(name, "FAIL", "memory is not shared, or its seals do not hold", _KERNEL_FIX)


def descriptor_passing(name: str) -> Finding:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        listener.bind("\0pgasdl-doctor-" + secrets.token_hex(8))
        listener.listen(1)
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        descriptor = os.memfd_create("pgasdl-doctor", os.MFD_CLOEXEC)
        with server, contextlib.closing(_Descriptor(descriptor)):
            os.write(descriptor, b"x")
            socket.send_fds(server, [b"m"], [descriptor])
            _, received, _, _ = socket.recv_fds(client, 1, 1)
            with contextlib.closing(_Descriptor(received[0])):
                same = os.pread(received[0], 1, 0) == b"x"
            credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            uid = int.from_bytes(credentials[4:8], sys.byteorder)
    if same and uid == os.geteuid():
        return Finding(name, "OK", "descriptor passed, peer's uid known")
    return Finding(name, "FAIL", f"descriptor lost, or a wrong uid ({uid})", _KERNEL_FIX)


def pidfd(name: str) -> Finding:
    with _child(signal.pause) as pid:
        descriptor = os.pidfd_open(pid)
        with contextlib.closing(_Descriptor(descriptor)):
            started = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            noticed = bool(select.select([descriptor], [], [], 1.0)[0])
            elapsed = time.perf_counter() - started
    if noticed:
        return Finding(name, "OK", f"the end of a killed process seen in {elapsed * 1e3:.1f} ms")
    return Finding(name, "FAIL", "the end of a killed process is not reported", _KERNEL_FIX)


def process_vm(name: str) -> Finding:
    """A sibling reads a sibling, as ranks do; a parent may more than that under Yama."""
    scope = _read("/proc/sys/kernel/yama/ptrace_scope") or "no Yama"
    for attempt, words in ((False, "between siblings"), (True, "with PR_SET_PTRACER_ANY")):
        error = _sibling_reads(allow=attempt)
        if error == 0:
            return Finding(name, "OK", f"works {words} (ptrace_scope: {scope})")
    return Finding(
        name,
        "WARN",
        f"refused: {os.strerror(error)} (ptrace_scope: {scope}); needed for ctx.bind only",
        "sysctl kernel.yama.ptrace_scope=0; in docker --cap-add=SYS_PTRACE",
    )


def _sibling_reads(*, allow: bool) -> int:
    source = ctypes.create_string_buffer(b"pgasdl", 8)

    def wait_to_be_read() -> None:
        if allow:
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
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


def membarrier(name: str) -> Finding:
    query = _syscall("membarrier", 0, 0, 0)
    if query >= 0 and query & _MEMBARRIER_PRIVATE_EXPEDITED:
        registered = _syscall("membarrier", _MEMBARRIER_REGISTER_PRIVATE_EXPEDITED, 0, 0)
        if registered == 0 and _syscall("membarrier", _MEMBARRIER_PRIVATE_EXPEDITED, 0, 0) == 0:
            return Finding(name, "OK", "expedited")
    return Finding(
        name, "WARN", "not available", "Linux 4.14 or newer; in docker allow it in seccomp"
    )


def futex(name: str) -> Finding:
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        word = ctypes.c_uint32.from_buffer(memory)
        result = _syscall("futex", ctypes.addressof(word), _FUTEX_WAKE, 1)
        del word
    if result == 0:
        return Finding(name, "OK", "wakes across processes")
    return Finding(name, "FAIL", f"refused: {os.strerror(-result)}", _KERNEL_FIX)


def memlock(name: str) -> Finding:
    """Registered memory is pinned, and counts against this; checked by the kernel as here."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(name, "OK", "unlimited")
    text = f"{soft / _MIB:g} MiB"
    if _may_lock_all():
        return Finding(name, "OK", f"{text}, but CAP_IPC_LOCK lifts it")
    if not kernel_devices():
        return Finding(name, "OK", f"{text} (matters with an RDMA device only)")
    text += (
        " for all that is registered: segments and their notifications are pinned whole, "
        f"e.g. {_RESNET50_BYTES / _MIB:.0f} MiB of gradients of ResNet-50"
    )
    if soft > 2 * _RESNET50_BYTES:
        return Finding(name, "OK", text)
    return Finding(
        name,
        "WARN",
        text,
        "ulimit -l unlimited; in docker --ulimit memlock=-1, or as root --cap-add=IPC_LOCK",
    )


def _may_lock_all() -> bool:
    """CAP_IPC_LOCK, which counts in the first user namespace only."""
    first = (_read("/proc/self/uid_map") or "").split() == ["0", "0", str(2**32 - 1)]
    for line in (_read("/proc/self/status") or "").splitlines():
        if line.startswith("CapEff:"):
            return first and bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def nofile(name: str) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    status = "OK" if soft >= 1024 else "WARN"
    return Finding(
        name, status, f"{soft} (at most {hard})", "" if status == "OK" else "ulimit -n 65536"
    )


def map_count(name: str) -> Finding:
    count = int(_read("/proc/sys/vm/max_map_count") or 0)
    if count >= 65530:
        return Finding(name, "OK", str(count))
    return Finding(name, "WARN", str(count), "sysctl vm.max_map_count=262144")


def memory(name: str) -> Finding:
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    available = int(fields["MemAvailable"].split()[0]) << 10
    limit = _cgroup_limit()
    text = f"{available / _MIB:.0f} MiB available"
    text += f", cgroup limit {limit / _MIB:.0f} MiB" if limit else ", no cgroup limit"
    if min(available, limit or available) < 512 * _MIB:
        return Finding(
            name, "WARN", text, "segments count as this cgroup's memory: raise its limit"
        )
    return Finding(name, "OK", text)


def _cgroup_limit() -> int | None:
    """The least memory limit of this process's cgroup and those above it, None without one."""
    limits = []
    for line in (_read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = Path("/sys/fs/cgroup" if not controllers else "/sys/fs/cgroup/memory")
        file = "memory.max" if not controllers else "memory.limit_in_bytes"
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            text = _read(str(place / file)) or ""
            if text.isdecimal() and int(text) < 1 << 60:
                limits.append(int(text))
            if place == root:
                break
    return min(limits, default=None)


def huge_pages(name: str) -> Finding:
    text = _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if text is None:
        return Finding(name, "WARN", "not in this kernel", "a kernel with TRANSPARENT_HUGEPAGE")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("always", "within_size", "advise", "force"):
        return Finding(name, "OK", chosen)
    fix = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    return Finding(name, "WARN", f"{chosen}: large segments use small pages", fix)


class _Descriptor:
    """So that ``contextlib.closing`` closes a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        os.close(self._descriptor)


@contextlib.contextmanager
def _child(work: Callable[[], object]) -> Iterator[int]:
    """A forked process that runs ``work``, killed and reaped at the end."""
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


def _syscall(call: str, *arguments: int) -> int:
    """The result, or minus errno."""
    number = _SYSCALLS.get(platform.machine(), {}).get(call)
    if number is None:
        return -38
    libc = ctypes.CDLL(None, use_errno=True)
    longs = [ctypes.c_long(argument) for argument in (*arguments, 0, 0, 0)]
    result = int(libc.syscall(ctypes.c_long(number), *longs))
    return -ctypes.get_errno() if result < 0 else result


def _read(path: str) -> str | None:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return None
