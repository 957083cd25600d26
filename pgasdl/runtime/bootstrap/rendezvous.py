"""How the ranks of a foreign launcher find their store: its secret and its address.

On one machine rank 0 listens on an abstract AF_UNIX name that all ranks derive from the launcher.
It hands secret and port to processes of the same user; each side checks the other's uid with the
kernel. The name ends with the process, so even kill -9 leaves no file. Between machines the secret
comes from a file (PGASDL_SECRET_FILE), and the port is derived from it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Mapping

from pgasdl.config import Config
from pgasdl.errors import BootstrapError, PgasTimeoutError, UnavailableError
from pgasdl.kernel import way_out
from pgasdl.runtime.bootstrap.channel import SECRET_BYTES, normalise_secret
from pgasdl.topology import Launch

_MAX_SECRET_FILE = 4096
_DISTINCT = 8  # bytes that differ, in any random text
_N_PORTS = 8
_DISCARD = 9  # a port, as sockets need one to find a route
_VARIABLE = "PGASDL_SECRET_FD"
_taken: int | None = None  # the descriptor in the variable
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_FIRST_PORT, _LAST_PORT = 20000, 32767  # below Linux's ephemeral range


def sealed_secret(secret: bytes) -> int:
    """Make a descriptor that every rank inherits and can read, and that no process can change."""
    try:
        descriptor = os.memfd_create("pgasdl-secret", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise UnavailableError(
            f"memfd_create is refused here ({error.strerror}): the job's secret and every segment "
            f"need it; {way_out('memfd_create')}"
        ) from error
    os.write(descriptor, secret)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def descriptor_of_secret(config: Config) -> int | None:
    """Return the descriptor that `pgasdl run` gave to this process, also to its second init.

    This removes the variable: in processes that this one starts the number belongs to other files.
    """
    global _taken  # noqa: PLW0603
    if config.secret_fd is not None:
        if os.environ.get(_VARIABLE) == str(config.secret_fd):
            del os.environ[_VARIABLE]
            _taken = config.secret_fd
        return config.secret_fd
    has_other_way = config.store is None or config.secret_file is not None
    return None if has_other_way else _taken


def secret_from_descriptor(descriptor: int) -> bytes:
    """Read the secret from the descriptor of `pgasdl run`; children do not inherit it further.

    It reads only what has the seals of :func:`sealed_secret`: in a process that a rank started, the
    number may be that of any file, such as a pipe.
    """
    hint = "only processes that `pgasdl run` starts itself have it, their children do not"
    try:
        is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        secret = os.pread(descriptor, SECRET_BYTES + 1, 0) if is_sealed else b""
    except OSError as error:
        raise BootstrapError(
            f"PGASDL_SECRET_FD={descriptor} is not the secret of a job ({error.strerror}): {hint}"
        ) from error
    if len(secret) != SECRET_BYTES:
        raise BootstrapError(f"PGASDL_SECRET_FD={descriptor} is not the secret of a job: {hint}")
    os.set_inheritable(descriptor, False)
    return secret


def secret_from_file(path: str) -> bytes:
    """Read the secret from a file that only this user, its owner, can read."""
    path = os.path.expanduser(path)  # as no shell does in a file of settings
    hint = f"make it with: (umask 077; head -c 32 /dev/urandom > {path})"
    try:
        # O_NONBLOCK: opening a FIFO that somebody put there must not hang.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BootstrapError(f"PGASDL_SECRET_FILE {path} is a symbolic link") from error
        raise BootstrapError(f"PGASDL_SECRET_FILE {path}: {error.strerror}; {hint}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BootstrapError(f"PGASDL_SECRET_FILE {path} is not a regular file; {hint}")
        if status.st_uid != os.geteuid():
            raise BootstrapError(
                f"PGASDL_SECRET_FILE {path} belongs to uid {status.st_uid}, not to this user"
            )
        if status.st_mode & 0o077:
            raise BootstrapError(
                f"PGASDL_SECRET_FILE {path} can be reached by others "
                f"(mode {stat.S_IMODE(status.st_mode):04o}): chmod 600 {path}, with a new secret"
            )
        content = os.read(descriptor, _MAX_SECRET_FILE + 1)
    finally:
        os.close(descriptor)
    if not SECRET_BYTES <= len(content) <= _MAX_SECRET_FILE:
        raise BootstrapError(
            f"PGASDL_SECRET_FILE {path} has {len(content)} bytes, it must have {SECRET_BYTES} to "
            f"{_MAX_SECRET_FILE}; {hint}"
        )
    if len(set(content)) < _DISTINCT:
        raise BootstrapError(f"PGASDL_SECRET_FILE {path} is not random: {hint}")
    return normalise_secret(content)


def derived_ports(secret: bytes, job_id: str) -> list[int]:
    """Return ports that only members of the job can derive; the store takes the first free one."""
    digest = hmac.digest(secret, b"ports\0" + job_id.encode(), "sha256")
    numbers = struct.unpack(f"!{_N_PORTS}I", digest[: 4 * _N_PORTS])
    return [_FIRST_PORT + number % (_LAST_PORT - _FIRST_PORT + 1) for number in numbers]


def route_to(host: str) -> str:
    """Return our own address on the interface that leads to ``host``. Sends nothing."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        raise BootstrapError(f"no route to {host!r}: {error}; set PGASDL_STORE") from error


def launcher_identity(signature: tuple[str, ...], environ: Mapping[str, str]) -> str:
    """Return process id and start time of the launcher's process above this rank.

    That is the first ancestor whose variables differ from this rank's, so a shell script between
    mpiexec and Python does not count. A process that we may not inspect is not ours, either.
    """
    mine = {name: environ.get(name) for name in signature}
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                entries = (part.partition(b"=") for part in file.read().split(b"\0"))
                theirs = {os.fsdecode(name): os.fsdecode(value) for name, _, value in entries}
        except OSError:
            break
        if any(theirs.get(name) != value for name, value in mine.items()):
            break
        parent, _ = _stat_of(pid)
        pid = parent
    return f"{pid}.{_stat_of(pid)[1]}"


def _stat_of(pid: int) -> tuple[int, str]:
    """Return parent and start time of a process. Its name may hold spaces and parentheses."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = re.sub(rb"^.*\)", b"", file.read(), flags=re.DOTALL).split()
        return int(fields[1]), fields[19].decode()
    except (OSError, IndexError, ValueError):
        return 0, "unknown"


def beacon_name(launch: Launch, environ: Mapping[str, str]) -> str:
    """Return the abstract socket name that the ranks of one launch derive."""
    parts = [launch.kind, launch.job_id, str(launch.size), str(os.geteuid())]
    if launch.signature:
        parts.append(launcher_identity(launch.signature, environ))
    return "\0pgasdl-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def open_beacon(name: str, deadline: float) -> socket.socket:
    """Open the listening socket of rank 0 under ``name``."""
    beacon = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        while True:
            try:
                beacon.bind(name)
                beacon.listen(1024)
                return beacon
            except OSError as error:
                # The last context of this process may still be closing; give it a second.
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise BootstrapError(
                        "another process of this user or another already serves as rank 0 of this "
                        f"job ({error}); if it is a stranger, set PGASDL_SECRET_FILE"
                    ) from error
            time.sleep(0.02)
    except BaseException:
        beacon.close()
        raise


def follow_beacon(name: str, launch: Launch, timeout: float) -> tuple[bytes, int]:
    """Get secret and port from rank 0, when it is there."""
    deadline = time.monotonic() + timeout
    n_message = SECRET_BYTES + 2
    while True:
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock,
            contextlib.suppress(ConnectionError, BlockingIOError, TimeoutError),
        ):
            sock.settimeout(1.0)
            sock.connect(name)
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            uid = struct.unpack("iII", credentials)[1]
            if uid != os.geteuid():
                raise BootstrapError(
                    f"uid {uid} poses as rank 0 of this job: set PGASDL_SECRET_FILE"
                )
            message = b""
            while len(message) < n_message:
                part = sock.recv(n_message - len(message))
                if not part:
                    break
                message += part
            if len(message) == n_message:
                return message[:SECRET_BYTES], int.from_bytes(message[SECRET_BYTES:], "big")
        if time.monotonic() >= deadline:
            raise PgasTimeoutError(
                f"rank {launch.rank} of {launch.size} ({launch.kind}): rank 0 did not appear on "
                f"this machine within {timeout:g} s; are all ranks in one network namespace? "
                "Otherwise set PGASDL_SECRET_FILE and PGASDL_STORE"
            )
        time.sleep(0.01)
