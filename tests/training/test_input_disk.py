"""The cache on disk: blocks that stay, leave, are damaged; processes that share it, and die."""

from __future__ import annotations

import logging
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from disk_tools import MINE, OTHER, SIZE, STORED, content, get, kept, nbytes_of, put, unfinished
from support.patience import PATIENCE
from support.starting import finished

from pgasdl.input import block_folder
from pgasdl.input.block_folder import BlockFolder
from pgasdl.input.disk import DiskCache


def age(folder: Path, digest: str, block: int, seconds: float) -> None:
    path = folder / digest / str(block)
    used = path.stat().st_mtime - seconds
    os.utime(path, (used, used))


def test_parts_of_blocks(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "new/folder", MINE)
    assert get(cache, 3) is None
    cache.put(3, memoryview(content(3)))
    cache.put(4, memoryview(b""))
    cache.put(5, memoryview(content(5, 3 << 20)))
    cache.put(3, memoryview(b"it is there already"))
    for reader in (cache, DiskCache(str(tmp_path / "new/folder"), MINE)):
        assert get(reader, 3) == content(3)
        assert get(reader, 3, 990, 10) == content(3)[990:]
        assert get(reader, 3, 1000, 0) == b""
        assert get(reader, 3, 991, 10) is None  # the trailer is no part of it
        assert get(reader, 4, 0, 0) == b"" and get(reader, 4, 0, 1) is None
        assert get(reader, 5, 2_000_000, 9) == content(5, 3 << 20)[2_000_000:][:9]
        reader.close()
        reader.close()
    assert get(DiskCache(tmp_path / "new/folder", OTHER), 3) is None
    assert unfinished(tmp_path / "new/folder") == []


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit -1"):
        DiskCache(tmp_path, MINE, limit=-1)
    for wrong in ("", "a", "../" + "a" * 29, "A" * 32):
        with pytest.raises(ValueError, match="digest"):
            DiskCache(tmp_path, wrong)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        DiskCache(tmp_path / "file", MINE)
    assert sorted(os.listdir(tmp_path)) == ["file"]


@pytest.mark.parametrize("what", ["link", "hard link", "fifo", "folder"])
def test_what_a_stranger_put_into_the_folder_is_not_followed(tmp_path: Path, what: str) -> None:
    theirs, folder = tmp_path / "theirs", tmp_path / "cache"
    for made in (theirs, folder):
        made.mkdir()
    (theirs / "3").write_text("no block")
    lock = folder / "lock"
    if what == "link":
        lock.symlink_to(theirs / "3")
    elif what == "hard link":
        lock.hardlink_to(theirs / "3")
    elif what == "fifo":
        os.mkfifo(lock)
    else:
        (folder / MINE).symlink_to(theirs)
    cache = DiskCache(folder, MINE)
    cache.put(3, memoryview(content(3)))  # it does without the folder
    assert get(cache, 3) is None
    assert (theirs / "3").read_text() == "no block" and os.listdir(theirs) == ["3"]


def damage(change: Callable[[bytearray], bytes | bytearray]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(bytearray(path.read_bytes()))) and None


@pytest.mark.parametrize(
    "harm",
    [
        damage(lambda data: data[:-1]),
        damage(lambda data: data[:500]),
        damage(lambda data: data[:10]),
        damage(lambda data: data[:0]),
        damage(lambda data: data + b"\0"),
        damage(lambda data: data[:7] + bytes([data[7] ^ 1]) + data[8:]),
        damage(lambda data: bytes(len(data))),
    ],
)
def test_a_damaged_block_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None]
) -> None:
    put(DiskCache(tmp_path, MINE), 1, 2)
    harm(tmp_path / MINE / "1")
    cache = DiskCache(tmp_path, MINE)
    assert get(cache, 1, 900, 5) is None and kept(tmp_path) == {2}
    assert get(cache, 1) is None and get(cache, 2) == content(2)
    [record] = caplog.records
    assert f"{MINE}/1 is damaged and is removed: it " in record.getMessage()
    put(cache, 1)
    assert get(cache, 1) == content(1) and len(caplog.records) == 1


def test_a_block_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verified = []
    crc32 = zlib.crc32
    cache = DiskCache(tmp_path, MINE)
    put(cache, *range(100))  # more than stay open
    monkeypatch.setattr(
        block_folder.zlib, "crc32", lambda data: [verified.append(len(data)), crc32(data)][1]
    )
    for _ in range(3):
        assert all(get(cache, block, 10, 10) == content(block)[10:20] for block in range(100))
    assert verified.count(SIZE) == 100
    (tmp_path / MINE / "0").unlink()  # by another job, which then puts it again
    put(DiskCache(tmp_path, MINE), 0)
    assert get(cache, 0) == content(0)


def test_the_furthest_next_use_leaves_first(tmp_path: Path) -> None:
    uses = {1: 10.0, 2: 40.0, 3: 30.0, 4: 20.0, 5: 50.0, 6: 20.0, 7: math.inf, 8: 5.0, 9: math.inf}
    cache = DiskCache(tmp_path, MINE, limit=3 * STORED + 5, next_use=uses.__getitem__)
    put(cache, 1, 2, 3)
    assert kept(tmp_path) == {1, 2, 3}
    put(cache, 4)
    assert kept(tmp_path) == {1, 3, 4} and get(cache, 2) is None
    put(cache, 5)  # the furthest itself
    assert kept(tmp_path) == {1, 3, 4}
    uses[1] = math.inf  # not used again
    put(cache, 5)
    assert kept(tmp_path) == {3, 4, 5} or kept(tmp_path) == {1, 3, 4}
    put(cache, 8)
    assert 8 in kept(tmp_path) and 1 not in kept(tmp_path)
    put(cache, 7, 9)  # never used: these displace nothing
    assert not {7, 9} & kept(tmp_path) and len(kept(tmp_path)) == 3
    assert get(cache, 8) == content(8)


def test_a_block_that_is_not_used_again_leaves_before_others(tmp_path: Path) -> None:
    uses = {1: 10.0, 2: math.inf, 3: 20.0, 4: 30.0, 5: math.inf}
    cache = DiskCache(tmp_path, MINE, limit=3 * STORED, next_use=uses.__getitem__)
    put(cache, 1, 2, 3, 4)
    assert kept(tmp_path) == {1, 3, 4}
    put(cache, 5, 2)
    assert kept(tmp_path) == {1, 3, 4}


def test_without_next_uses_the_longest_unused_leaves(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MINE, limit=3 * STORED)
    put(cache, 1, 2, 3)
    for block, seconds in ((1, 5000), (2, 9000), (3, 7000)):
        age(tmp_path, MINE, block, seconds)
    assert get(cache, 2, 0, 1)  # its first use here: the disk knows it
    put(cache, 4)
    assert kept(tmp_path) == {1, 2, 4}
    put(cache, 5)
    assert kept(tmp_path) == {2, 4, 5}
    cache.put(6, memoryview(content(6, 3 * STORED)))  # more than fits at all
    assert kept(tmp_path) == {2, 4, 5}


def test_data_sets_share_a_folder(tmp_path: Path) -> None:
    limit = 4 * STORED
    put(DiskCache(tmp_path, OTHER, limit=limit), 1, 2, 3)
    uses = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    cache = DiskCache(tmp_path, MINE, limit=limit, next_use=uses.__getitem__)
    age(tmp_path, OTHER, 2, 10)
    put(cache, 2)
    assert kept(tmp_path, OTHER) == {1, 2, 3} and kept(tmp_path) == {2}
    put(cache, 3)  # the equal share
    assert kept(tmp_path, OTHER) == {1, 3} and kept(tmp_path) == {2, 3}
    put(cache, 4)
    assert kept(tmp_path, OTHER) == {1, 3} and kept(tmp_path) == {2, 3}
    put(cache, 1)
    assert kept(tmp_path, OTHER) == {1, 3} and kept(tmp_path) == {1, 2}
    age(tmp_path, OTHER, 1, 3700)
    age(tmp_path, OTHER, 3, 3500)
    cache = DiskCache(tmp_path, MINE, limit=limit, next_use=uses.__getitem__)
    put(cache, 3, 4)
    assert kept(tmp_path, OTHER) == {3} and kept(tmp_path) == {1, 2, 3}
    uses[4] = 0.5
    put(cache, 4)
    assert kept(tmp_path, OTHER) == {3} and kept(tmp_path) == {1, 2, 4}
    assert nbytes_of(tmp_path) <= limit


def test_what_is_beyond_its_share_leaves_alone(tmp_path: Path) -> None:
    third = "3" * 32
    limit = 6 * STORED
    put(DiskCache(tmp_path, OTHER), 1, 2, 3, 4)
    put(DiskCache(tmp_path, third), 1, 2)
    for block in (1, 2):
        age(tmp_path, third, block, 1000)
    cache = DiskCache(tmp_path, MINE, limit=limit, next_use=lambda _: math.inf)
    put(cache, 1)  # not used again: not worth it
    assert kept(tmp_path) == set()
    cache = DiskCache(tmp_path, MINE, limit=limit, next_use=lambda _: 1)
    put(cache, 1, 2, 3, 4)
    assert kept(tmp_path, third) == {1, 2}
    assert len(kept(tmp_path, OTHER)) == 2 and kept(tmp_path) == {1, 2}


def test_what_is_no_block_stays(tmp_path: Path) -> None:
    for name in ("data/1", f"{MINE}/readme", f"{OTHER}x/1", "1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(5 * STORED))
        os.utime(tmp_path / name, (0, 0))
    cache = DiskCache(tmp_path, MINE, limit=STORED)
    put(cache, 1, 2, 3)
    assert sorted(os.listdir(tmp_path / MINE)) == ["3", "readme"]
    assert all((tmp_path / name).exists() for name in ("data/1", f"{OTHER}x/1", "1"))


def test_room_for_several_puts_is_made_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    scan = BlockFolder.scan
    monkeypatch.setattr(BlockFolder, "scan", lambda self: [looks.append(0), scan(self)][1])
    cache = DiskCache(tmp_path, MINE, limit=64 * STORED, next_use=lambda block: -block)
    put(cache, *range(64))
    assert len(looks) == 1
    put(cache, *range(64, 128))
    assert len(looks) < 20 and 60 <= len(kept(tmp_path)) <= 64
    assert min(kept(tmp_path)) >= 64
    del looks[:]
    put(cache, *reversed(range(64)))  # none is used before those that are kept
    assert len(looks) <= 5 and min(kept(tmp_path)) >= 60


def test_a_smaller_limit_than_before(tmp_path: Path) -> None:
    put(DiskCache(tmp_path, MINE), *range(10))
    cache = DiskCache(tmp_path, MINE, limit=3 * STORED, next_use=lambda block: block)
    put(cache, 11)
    assert kept(tmp_path) == {0, 1, 2}
    cache = DiskCache(tmp_path, MINE, limit=0)
    put(cache, 12)
    assert kept(tmp_path) == {0, 1, 2}


@pytest.mark.parametrize("text", [b"", b"nonsense", b"-5", b"\xff" * 30])
def test_a_count_that_is_lost(tmp_path: Path, text: bytes) -> None:
    cache = DiskCache(tmp_path, MINE, limit=3 * STORED)
    put(cache, 1, 2, 3)
    (tmp_path / "lock").write_bytes(text)
    put(cache, 4)
    assert len(kept(tmp_path)) == 3 and 4 in kept(tmp_path)
    (tmp_path / "lock").unlink()
    put(cache, 5)
    assert len(kept(tmp_path)) == 3 and 5 in kept(tmp_path)


def test_threads_share_a_cache(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MINE, limit=8 * STORED)
    found = []

    def use(number: int) -> bool:
        put(cache, number % 12)
        got = get(cache, number % 12, 3, 500)
        found.append(got is not None)
        return got in (None, content(number % 12)[3:503])

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(use, range(300)))
    assert any(found) and nbytes_of(tmp_path) <= 8 * STORED and unfinished(tmp_path) == []


def test_what_is_being_written_counts_and_stays(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MINE, limit=4 * STORED)
    with cache._folder.new_file() as (descriptor, path):
        os.ftruncate(descriptor, 3 * STORED)
        put(cache, 1, 2)
        assert kept(tmp_path) == {2} and [Path(path).name] == unfinished(tmp_path)
    put(cache, 3, 4, 5, 6)
    assert len(kept(tmp_path)) == 4


# A disk that fails


def test_a_folder_that_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = DiskCache(tmp_path / "a", MINE)
    put(cache, 1)
    assert get(cache, 1) == content(1)
    (tmp_path / "a").rename(tmp_path / "b")
    put(cache, 2, 3)
    assert get(cache, 2) is None and get(cache, 1) == content(1)  # it is open
    [record] = caplog.records
    assert "a keeps no more blocks: [Errno 2]" in record.getMessage()


DISK_IS_FULL = """
import logging, os, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from disk_tools import DiskCache, MINE, STORED, content, get, kept, put, unfinished
logging.basicConfig(format="LOGGED %(message)s")
folder = Path(sys.argv[2])
cache = DiskCache(folder, MINE)
put(cache, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (STORED - 1, resource.RLIM_INFINITY))
put(cache, 2, 3)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
put(cache, 4)
assert kept(folder) == {1} and unfinished(folder) == [], os.listdir(folder)
assert get(cache, 1) == content(1) and get(cache, 2) is None
"""


def command(program: str, folder: Path, *arguments: str) -> list[str]:
    tools = str(Path(__file__).parent)
    return [sys.executable, "-P", "-c", program, tools, str(folder), *arguments]


def child(program: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    line = command(program, folder, *arguments)
    return subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_a_file_that_cannot_grow(tmp_path: Path) -> None:
    line = command(DISK_IS_FULL, tmp_path)
    done = finished(line, env=dict(os.environ), timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    [told] = [line for line in done.stderr.splitlines() if line.startswith("LOGGED")]
    assert "keeps no more blocks: [Errno 27]" in told


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """64 KiB, where tests may mount."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount")
    if done.returncode != 0:
        pytest.skip("mounting is not allowed")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path):
        cache = DiskCache(tmp_path, MINE, limit=1 << 30)
        big = 20_000
        for block in range(6):
            cache.put(block, memoryview(content(block, big)))
        assert kept(tmp_path) == {0, 1, 2} and unfinished(tmp_path) == []
        assert get(cache, 2, 0, big) == content(2, big) and get(cache, 3) is None
        [record] = caplog.records
        assert record.levelno == logging.WARNING and "[Errno 28]" in record.getMessage()
        (tmp_path / MINE / "0").rename(tmp_path / "filler")
        with (tmp_path / "filler").open("ab") as file:  # not even a folder can be made
            while os.statvfs(tmp_path).f_bavail:
                file.write(bytes(4096))
                file.flush()
        other = DiskCache(tmp_path, OTHER, limit=1 << 30)
        put(other, 1)
        assert get(other, 1) is None and len(caplog.records) == 2
        cache.close()


# Processes

WORKER = """
import random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from disk_tools import DiskCache, MINE, OTHER, STORED, content, get, nbytes_of, put
folder, seed = Path(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
limit = 10 * STORED
digest = MINE if seed < 2 else OTHER
order = {block: chance.random() for block in range(30)}
cache = DiskCache(folder, digest, limit=limit, next_use=order.__getitem__ if seed else None)
print("ready", flush=True)
sys.stdin.readline()
hits = 0
for _ in range(120):
    block = chance.randrange(30)
    order[block] = chance.random()
    put(cache, block)
    got = get(cache, block, 100, 700)
    assert got is None or got == content(block)[100:800]
    hits += got is not None
    with cache._folder.locked():
        assert nbytes_of(folder) <= limit, nbytes_of(folder)
assert hits, "nothing was ever kept"
"""


def test_processes_share_a_folder(tmp_path: Path) -> None:
    workers = [child(WORKER, tmp_path, str(seed)) for seed in range(3)]
    for worker in workers:
        assert worker.stdout and worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin
        worker.stdin.write("\n")
        worker.stdin.flush()
    for worker in workers:
        _, told = worker.communicate(timeout=PATIENCE)
        assert worker.returncode == 0 and told == "", told
    assert nbytes_of(tmp_path) <= 10 * STORED and unfinished(tmp_path) == []
    cache = DiskCache(tmp_path, MINE)
    assert all(get(cache, block) == content(block) for block in kept(tmp_path))


DIES = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from disk_tools import DiskCache, MINE, STORED, put
cache = DiskCache(sys.argv[2], MINE, limit=3 * STORED, next_use=lambda block: block)
put(cache, 11, 12, 13)
def stop(*_):
    print("middle", flush=True)
    signal.pause()
setattr(os, sys.argv[3], stop)
put(cache, 10)
"""


@pytest.mark.parametrize("at", ["unlink", "pwrite", "ftruncate", "rename"])
def test_a_process_that_is_killed_during_a_put(tmp_path: Path, at: str) -> None:
    before = DiskCache(tmp_path, MINE, limit=3 * STORED, next_use=lambda block: block)
    with child(DIES, tmp_path, at) as process:
        try:
            assert process.stdout and process.stdout.readline() == "middle\n"
            if at == "rename":  # outside the lock: others put, and leave its file alone
                assert len(unfinished(tmp_path)) == 1
                put(before, 9)
                DiskCache(tmp_path, MINE)
                assert len(unfinished(tmp_path)) == 1 and kept(tmp_path) == {9, 11}
        finally:
            process.kill()
    assert nbytes_of(tmp_path) <= 3 * STORED
    assert get(before, 11) == content(11)
    put(before, 8, 7, 6)
    assert kept(tmp_path) == {8, 7, 6} and nbytes_of(tmp_path) == 3 * STORED
    later = DiskCache(tmp_path, MINE, limit=3 * STORED, next_use=lambda block: block)
    assert unfinished(tmp_path) == []
    put(later, 5)
    assert kept(tmp_path) == {7, 6, 5}
    assert all(get(later, block) == content(block) for block in kept(tmp_path))


def test_a_lock_that_is_not_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(block_folder, "_LOCKED_FOR", 0.01)
    cache = DiskCache(tmp_path, MINE)
    put(cache, 1)
    with cache._folder.locked():
        put(cache, 2, 3)
    assert kept(tmp_path) == {1} and get(cache, 1) == content(1)
    [record] = caplog.records
    assert "another process has locked" in record.getMessage()


def test_a_block_that_leaves_stays_with_its_readers(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MINE)
    put(cache, 1)
    assert get(cache, 1, 0, 10) == content(1)[:10]
    other = DiskCache(tmp_path, MINE, limit=STORED)
    put(other, 2)
    assert kept(tmp_path) == {2}
    assert get(cache, 1) == content(1) and get(other, 1) is None


# Others


STRANGER = 65534


@contextmanager
def another_user() -> Iterator[Path]:
    """A folder that a user who is not its owner, and is this process afterwards, can read."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        try:
            yield folder
        finally:
            os.seteuid(0 if os.getuid() == 0 else os.getuid())


def become_another(folder: Path) -> None:
    """Lose what root may do: nobody can write to the folder."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    if os.getuid() == 0:
        os.seteuid(STRANGER)


def test_a_folder_that_is_complete_and_read_only_serves(caplog: pytest.LogCaptureFixture) -> None:
    with another_user() as folder:
        put(DiskCache(folder, MINE), 1, 2)
        become_another(folder)
        cache = DiskCache(folder, MINE)
        assert get(cache, 1) == content(1) and get(cache, 2) == content(2) and cache.keeps(9)
        assert not caplog.records
        put(cache, 3, 4)
        assert get(cache, 3) is None and get(cache, 1) == content(1) and not cache.keeps(9)
        [record] = caplog.records
        assert "keeps no more blocks" in record.getMessage()


def by_stranger(path: Path) -> None:
    try:
        os.chown(path, STRANGER, STRANGER)
    except PermissionError:
        pytest.skip("only root can make another user's file")


def by_group(path: Path) -> None:
    try:
        os.chown(path, -1, STRANGER)
    except PermissionError:
        pytest.skip("only root can give a file to another group")
    path.chmod(0o664)


def by_link(path: Path) -> None:
    path.rename(path.with_name("x"))
    path.symlink_to("x")


@pytest.mark.parametrize("harm", [by_stranger, by_group, by_link])
def test_a_block_that_another_user_could_have_written_is_not_read(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    put(DiskCache(tmp_path, MINE), 1, 2)
    harm(tmp_path / MINE / "1")
    cache = DiskCache(tmp_path, MINE)
    assert get(cache, 1) is None and get(cache, 2) == content(2)
    if harm is not by_link:
        put(cache, 1)
        assert get(DiskCache(tmp_path, MINE), 1) == content(1)


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda folder: by_stranger(folder / MINE), f"{MINE} belongs to uid {STRANGER}"),
        (lambda folder: (folder / MINE).chmod(0o777), f"others can write to .*{MINE}"),
        (lambda folder: folder.chmod(0o777), "others can rename"),
        (lambda folder: (folder / MINE).rename(folder / "x") and (folder / MINE).touch(), "Errno"),
    ],
)
def test_a_folder_that_others_can_change_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None], told: str
) -> None:
    folder = tmp_path / "cache"
    put(DiskCache(folder, MINE), 1, 2)
    harm(folder)
    cache = DiskCache(folder, MINE)
    put(cache, 3, 4)
    assert get(cache, 1) is None and not cache.keeps(9)
    [record] = caplog.records
    assert re.search(told, record.getMessage())


def test_what_strangers_put_beside_a_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a folder such as /tmp: their data sets, and what looks unfinished, are left alone."""
    tmp_path.chmod(0o1777)
    (tmp_path / OTHER).mkdir()
    (tmp_path / OTHER / "1").write_bytes(bytes(9))
    (tmp_path / "unfinished-1").symlink_to("/nothing")
    (tmp_path / OTHER).chmod(0)
    cache = DiskCache(tmp_path, MINE, limit=3 * STORED)
    put(cache, 1, 2)
    assert get(cache, 1) == content(1) and kept(tmp_path) == {1, 2}
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").symlink_to("elsewhere")
    put(cache, 3, 4)
    assert get(cache, 2) == content(2) and kept(tmp_path) == {1, 2}
    assert not (tmp_path / "elsewhere").exists()
    [record] = caplog.records
    assert "keeps no more blocks" in record.getMessage()


def test_nobody_else_can_hold_the_lock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = os.umask(0o002)
    try:
        cache = DiskCache(tmp_path / "new/cache", MINE)
        put(cache, 1)
    finally:
        os.umask(before)
    lock = tmp_path / "new/cache/lock"
    assert lock.stat().st_mode & 0o777 == 0o600
    assert get(DiskCache(tmp_path / "new/cache", MINE), 1) == content(1)  # whatever the umask is
    lock.chmod(0o666)  # of an earlier version
    put(cache, 2)
    assert lock.stat().st_mode & 0o777 == 0o600 and not caplog.records
    by_stranger(lock)
    put(cache, 3, 4)
    assert kept(lock.parent) == {1, 2} and get(cache, 2) == content(2)
    [record] = caplog.records
    assert "it is no file of this user" in record.getMessage()


def test_a_pipe_is_no_block(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MINE)
    os.mkfifo(tmp_path / MINE / "7")
    got: list[bytes | None] = []
    thread = threading.Thread(target=lambda: got.append(get(cache, 7)), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert got == [None]
    put(cache, 7)
    assert got == [None]
