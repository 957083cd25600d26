"""How ranks find their store under each launcher, and what keeps others out."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pgasdl.config import Config
from pgasdl.errors import BootstrapError, MismatchError, PgasTimeoutError
from pgasdl.runtime.bootstrap import LocalStore, Store, connect, rendezvous
from pgasdl.runtime.bootstrap.detect import detect
from pgasdl.runtime.init import start_joined
from pgasdl.topology import Launch

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed, so root")


def together(n: int, start: Callable[[int], Store]) -> list[list[bytes]]:
    """Connect ``n`` ranks as threads and let each exchange its number."""

    def work(rank: int) -> list[bytes]:
        with start(rank) as store:
            return store.exchange("who", b"%d" % rank)

    with ThreadPoolExecutor(n) as pool:
        return [future.result(20) for future in [pool.submit(work, r) for r in range(n)]]


def secret_file(folder: Path, mode: int = 0o600, n: int = 32) -> str:
    path = folder / "secret"
    path.write_bytes(os.urandom(n))
    path.chmod(mode)
    return str(path)


def torchrun(rank: int, size: int, local: int | None = None, port: int = 29500) -> Launch:
    local = size if local is None else local
    job_id = f"torchrun:{port}"
    return Launch("torchrun", rank, size, rank % local, local, job_id, "127.0.0.1")


def test_ranks_that_cannot_begin_all_learn_why() -> None:
    """Rank 0, which serves the store, fails before rank 1 has asked for what both have told."""
    port = 29000 + os.getpid() % 1000

    def work(rank: int) -> None:
        config = Config.from_environment({}, timeout=20, transport=("shm", "verbs")[rank])
        launch = torchrun(rank, 2, port=port)
        store = connect(config, launch)
        if rank == 1:
            gather = store.gather

            def late(*arguments: Any, **options: Any) -> list[bytes]:
                time.sleep(0.5)
                return gather(*arguments, **options)

            store.gather = late  # type: ignore[method-assign]
        with pytest.raises(MismatchError, match="give all ranks the same"):
            start_joined(config, launch, store, None)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work, rank) for rank in range(2)]:
            future.result(20)


def test_single_rank_needs_no_socket() -> None:
    config = Config.from_environment({})
    with connect(config, detect(config, {})) as store:
        assert isinstance(store, LocalStore)
        assert store.exchange("a", b"1") == [b"1"]


def test_ranks_of_a_foreign_launcher_on_one_machine() -> None:
    config = Config.from_environment({}, timeout=10)
    port = 29000 + os.getpid() % 1000
    for _ in range(2):  # and once more in the same job
        results = together(3, lambda rank: connect(config, torchrun(rank, 3, port=port)))
        assert results == [[b"0", b"1", b"2"]] * 3


def test_no_rank_0_is_a_timeout_that_says_what_to_do() -> None:
    config = Config.from_environment({}, timeout=0.2)
    with pytest.raises(
        PgasTimeoutError, match=r"rank 1 of 2.*rank 0 did not appear.*PGASDL_SECRET_FILE"
    ):
        connect(config, torchrun(1, 2, port=1))


def test_secret_file_on_one_machine(tmp_path: Path) -> None:
    config = Config.from_environment({}, timeout=10, secret_file=secret_file(tmp_path))
    assert together(2, lambda r: connect(config, torchrun(r, 2))) == [[b"0", b"1"]] * 2


def test_stranger_on_a_derived_port_is_passed_over(tmp_path: Path) -> None:
    path = secret_file(tmp_path)
    config = Config.from_environment({}, timeout=10, secret_file=path)
    launch = torchrun(0, 2)
    ports = rendezvous.derived_ports(rendezvous.secret_from_file(path), launch.job_id)
    assert len(set(ports)) > 1 and all(20000 <= port <= 32767 for port in ports)
    with socket.create_server(("127.0.0.1", ports[0])) as stranger:
        stranger.settimeout(10)

        def answer() -> None:
            sock, _ = stranger.accept()
            with sock:
                sock.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3" + bytes(26))
                time.sleep(0.2)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(answer)
            assert together(2, lambda r: connect(config, torchrun(r, 2))) == [[b"0", b"1"]] * 2


def test_by_hand_with_secret_file_and_store(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        store = free.getsockname()
    path = secret_file(tmp_path, n=100)

    def start(rank: int) -> Store:
        config = Config.from_environment(
            {}, rank=rank, size=2, store=store, secret_file=path, timeout=10
        )
        return connect(config, detect(config, {}))

    assert together(2, start) == [[b"0", b"1"]] * 2


def test_by_hand_without_a_secret_says_what_to_do() -> None:
    config = Config.from_environment({}, rank=0, size=2)
    with pytest.raises(BootstrapError, match=r"pgasdl run.*PGASDL_SECRET_FILE.*PGASDL_STORE"):
        connect(config, detect(config, {}))
    config = Config.from_environment({}, rank=0, size=2, secret_fd=99)
    with pytest.raises(BootstrapError, match="PGASDL_STORE"):
        connect(config, detect(config, {}))


@pytest.mark.parametrize("kind", ["torchrun", "openmpi", "mpich", "slurm"])
def test_several_machines_without_a_secret_say_what_to_do(kind: str) -> None:
    master = "10.0.0.1" if kind == "torchrun" else None
    launch = Launch(kind, 0, 4, 0, 2, "job", master)
    with pytest.raises(BootstrapError, match=r"4 ranks on several machines.*chmod|umask 077") as e:
        connect(Config.from_environment({}), launch)
    assert "PGASDL_SECRET_FILE" in str(e.value)
    assert ("PGASDL_STORE" in str(e.value)) == (kind != "torchrun")


def test_several_machines_with_a_secret(tmp_path: Path) -> None:
    config = Config.from_environment({}, timeout=10, secret_file=secret_file(tmp_path))
    with pytest.raises(BootstrapError, match="PGASDL_STORE=HOST:PORT"):
        connect(config, Launch("mpich", 0, 4, 0, 2, "job"))
    with pytest.raises(BootstrapError, match=r"loopback.*PGASDL_STORE"):
        connect(config, torchrun(0, 2, local=1))
    address = rendezvous.route_to("192.0.2.1")
    if address.startswith("127."):
        pytest.skip("this machine has no route to anywhere")
    results = together(2, lambda r: connect(config, Launch("torchrun", r, 2, 0, 1, "job", address)))
    assert results == [[b"0", b"1"]] * 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("store", [("node..cluster", 29511), None])
def test_a_word_that_cannot_be_a_name_is_refused_at_once(
    rank: int, store: tuple[str, int] | None, tmp_path: Path
) -> None:
    config = Config.from_environment({}, store=store, secret_file=secret_file(tmp_path))
    with pytest.raises(BootstrapError, match=r"node\.\.cluster.*label empty"):
        connect(config, Launch("torchrun", rank, 2, 0, 1, "job", "node..cluster"))


# How the secret is protected.


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777, 0o620])
def test_secret_file_others_can_reach(tmp_path: Path, mode: int) -> None:
    with pytest.raises(BootstrapError, match="chmod 600"):
        rendezvous.secret_from_file(secret_file(tmp_path, mode))


def test_secret_file_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = secret_file(tmp_path)
    assert rendezvous.secret_from_file(good) == Path(good).read_bytes()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert rendezvous.secret_from_file("~/secret") == Path(good).read_bytes()
    (tmp_path / "link").symlink_to(good)
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "folder").mkdir(0o700)
    for name, reason in (
        ("link", "symbolic link"),
        ("fifo", "not a regular file"),
        ("folder", "not a regular file"),
        ("missing", "No such file.*urandom"),
    ):
        with pytest.raises(BootstrapError, match=reason):
            rendezvous.secret_from_file(str(tmp_path / name))
    for n in (0, 31, 4097):
        with pytest.raises(BootstrapError, match=f"{n} bytes"):
            rendezvous.secret_from_file(secret_file(tmp_path, n=n))
    good_length = Path(good)
    for content in (bytes(32), b"a" * 4096, b"abcdefg" * 10):
        good_length.write_bytes(content)
        with pytest.raises(BootstrapError, match="is not random"):
            rendezvous.secret_from_file(good)


@root_only
def test_secret_file_of_another_user(tmp_path: Path) -> None:
    path = secret_file(tmp_path)
    os.chown(path, 65534, 65534)
    with pytest.raises(BootstrapError, match="belongs to uid 65534"):
        rendezvous.secret_from_file(path)


def test_secret_from_a_descriptor() -> None:
    secret = os.urandom(32)
    memory = rendezvous.sealed_secret(secret)
    os.set_inheritable(memory, True)
    assert rendezvous.secret_from_descriptor(memory) == secret
    assert rendezvous.secret_from_descriptor(memory) == secret
    assert not os.get_inheritable(memory)
    os.close(memory)
    with pytest.raises(BootstrapError, match="pgasdl run"):
        rendezvous.secret_from_descriptor(memory)


def test_another_file_under_the_number_of_the_secret(tmp_path: Path) -> None:
    """A process that a rank started may have any file there; a read of a pipe would not end."""
    reader, writer = os.pipe()
    unsealed = os.memfd_create("secret", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(unsealed, bytes(32))
    short = rendezvous.sealed_secret(bytes(31))
    file = os.open(secret_file(tmp_path), os.O_RDONLY)
    for other in (reader, unsealed, short, file):
        os.set_inheritable(other, True)
        with pytest.raises(BootstrapError, match="is not the secret of a job"):
            rendezvous.secret_from_descriptor(other)
        assert os.get_inheritable(other)  # whoever's it is keeps it
    for descriptor in (reader, writer, unsealed, short, file):
        os.close(descriptor)


def as_nobody(work: Callable[[], int]) -> int:
    """Fork; the child gives up root and exits with the status that ``work`` returns."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            status = work()
        finally:
            os._exit(status)
    return pid


@root_only
def test_another_user_gets_no_secret() -> None:
    config = Config.from_environment({}, timeout=10)
    port = 28000 + os.getpid() % 1000
    name = rendezvous.beacon_name(torchrun(0, 2, port=port), {})

    def ask() -> int:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(name)
            return len(sock.recv(100))

    with connect(config, torchrun(0, 2, port=port)):
        pid = as_nobody(ask)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with connect(config, torchrun(1, 2, port=port)) as store:
            store.put("a", b"")


@root_only
def test_another_user_cannot_pose_as_rank_0() -> None:
    port = 27000 + os.getpid() % 1000
    name = rendezvous.beacon_name(torchrun(1, 2, port=port), {})

    def pose() -> int:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(name)
            sock.listen()
            os.write(ready[1], b"x")
            other, _ = sock.accept()
            with contextlib.suppress(OSError):
                other.send(bytes(32) + struct.pack("!H", 1))
            time.sleep(30)
            return 0

    ready = os.pipe()
    pid = as_nobody(pose)
    os.read(ready[0], 1)
    config = Config.from_environment({}, timeout=5)
    with pytest.raises(BootstrapError, match="uid 65534 poses as rank 0"):
        connect(config, torchrun(1, 2, port=port))
    with pytest.raises(BootstrapError, match=r"rank 0 of this job.*PGASDL_SECRET_FILE"):
        connect(config, torchrun(0, 2, port=port))
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    for descriptor in ready:
        os.close(descriptor)


def test_nothing_is_left_in_the_file_system(tmp_path: Path) -> None:
    before = set(os.listdir("/tmp")) | set(os.listdir("/dev/shm"))
    test_ranks_of_a_foreign_launcher_on_one_machine()
    after = set(os.listdir("/tmp")) | set(os.listdir("/dev/shm"))
    assert not [name for name in after - before if "pgasdl" in name]
