"""Storage: what names stand for, and ranges from folders and from servers that misbehave."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.patience import PATIENCE, until
from support.storage_server import ALWAYS, Faults, StorageServer

from pgasdl.errors import ClosedError, DataError, UnavailableError
from pgasdl.input.descriptors import Descriptor, Descriptors
from pgasdl.input.files import File, Files, expanded
from pgasdl.input.storage import Storage
from pgasdl.input.threads import at_once


def content(name: str, nbytes: int) -> bytes:
    """Bytes that differ from one file to another."""
    return bytes((sum(name.encode()) + 31 * place) % 251 for place in range(nbytes))


@pytest.fixture
def storage() -> Iterator[Storage]:
    made = Storage(tries=3, pause=0)
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of several sizes, hidden ones, and what is none."""
    for name, nbytes in (
        ("b.tar", 1000),
        ("a.tar", 300),
        ("sub.d/c.tar", 7),
        ("sub/x-0002.bin", 0),
        ("sub/x-0010.bin", 12),
        (".hidden", 5),
        ("sub/.git/d", 5),
    ):
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(name, nbytes))
    os.mkfifo(tmp_path / "set/pipe")
    return tmp_path / "set"


@pytest.fixture
def server(folder: Path) -> Iterator[StorageServer]:
    pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    (folder / "pipe").unlink()
    with StorageServer(folder) as made:
        yield made


VISIBLE = ["a.tar", "b.tar", "sub.d/c.tar", "sub/x-0002.bin", "sub/x-0010.bin"]


def names(files: list[File], root: str | Path) -> list[str]:
    return [file.url.removeprefix(f"{root}/") for file in files]


def only(files: list[File]) -> tuple[str, int]:
    (file,) = files
    return file.url, file.nbytes


def read(storage: Storage, file: File, offset: int, nbytes: int) -> bytes:
    out = memoryview(bytearray(b"?" * nbytes))
    storage.fill(file, offset, out)
    return bytes(out)


# What names stand for


def test_a_local_folder_and_patterns(
    storage: Storage, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)  # local paths do not need it
    assert names(storage.find(folder), folder) == VISIBLE
    assert [file.nbytes for file in storage.find(str(folder))] == [300, 1000, 7, 0, 12]
    assert names(storage.find(f"file://{folder}/*.tar"), folder) == ["a.tar", "b.tar"]
    assert names(storage.find(f"{folder}/**/*.tar"), folder) == VISIBLE[:3]
    assert names(storage.find(f"{folder}/sub/x-{{0002..0002}}.bin"), folder) == ["sub/x-0002.bin"]
    both = storage.find([folder / "b.tar", f"{folder}/sub/", folder / "a.tar"])
    assert names(both, folder) == ["b.tar", "sub/x-0002.bin", "sub/x-0010.bin", "a.tar"]
    assert names(storage.find(folder / ".hidden"), folder) == [".hidden"]
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    for relative in ("set/a.tar", "./set/../set/a.tar", "~/set/a.tar"):
        assert only(storage.find(relative)) == (f"{folder}/a.tar", 300)
    (folder / "a b.tar").touch()
    (folder / "x[1].tar").write_bytes(b"1")
    assert only(storage.find((folder / "a b.tar").as_uri())) == (f"{folder}/a b.tar", 0)
    assert only(storage.find(folder / "x[1].tar")) == (f"{folder}/x[1].tar", 1)


def test_links_in_a_local_folder(storage: Storage, folder: Path) -> None:
    other = folder.parent / "other"
    other.mkdir()
    (other / "z").write_bytes(b"zz")
    (folder / "linked").symlink_to(other)
    assert names(storage.find(folder), folder) == [*VISIBLE[:2], "linked/z", *VISIBLE[2:]]
    (other / "again").symlink_to(folder)
    with pytest.raises(DataError, match=r"linked/again is in .* twice"):
        storage.find(folder)
    (other / "again").unlink()
    (folder / "nowhere").symlink_to(folder / "missing")
    with pytest.raises(DataError, match="nowhere"):
        storage.find(folder)


def test_names_of_no_file(storage: Storage, folder: Path) -> None:
    (folder.parent / "empty").mkdir()
    for wrong, told in (
        (folder / "c.tar", r"c\.tar: no file"),
        (folder / "*.zip", r"\*\.zip: no file"),
        (f"file://{folder}/c.tar", r"c\.tar: no file"),
        (folder.parent / "empty", "empty: no file"),
        (folder / "pipe", "pipe is no file"),
        ([], "no file is named"),
        ([folder / "a.tar", f"{folder}/*.tar"], r"a\.tar is named twice"),
        (folder / "a.tar" / "b", r"a\.tar/b"),
        (f"{folder}/{{0..3}}.tar", r"0\.tar: no file"),
    ):
        with pytest.raises(DataError, match=told):
            storage.find(wrong)
    with pytest.raises(TypeError):
        storage.find([3])  # type: ignore[list-item]
    for options in ({"tries": 0}, {"pause": -1}, {"timeout": 0}):
        with pytest.raises(ValueError, match=r"tries .*, pause .*, timeout"):
            Storage(**options)


@given(
    st.lists(
        st.one_of(
            st.sampled_from(["a", "/", "-", ".."]),
            st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 4)).map(
                lambda numbers: f"{{{numbers[0]:0{numbers[2]}}..{numbers[1]:0{numbers[2]}}}}"
            ),
        ),
        max_size=4,
    ).map("".join)
)
def test_ranges_are_webdatasets(pattern: str) -> None:
    braceexpand = pytest.importorskip("braceexpand").braceexpand
    assert list(expanded(pattern)) == list(braceexpand(pattern))


def test_a_range_keeps_its_zeros() -> None:
    assert list(expanded("s-{0008..0011}.tar")) == [f"s-00{n}.tar" for n in ("08", "09", 10, 11)]
    assert list(expanded("{8..10}/{1..2}")) == ["8/1", "8/2", "9/1", "9/2", "10/1", "10/2"]
    assert list(expanded("{a,b}{1..}")) == ["{a,b}{1..}"]


# Local reads


@given(data=st.data())
def test_ranges_over_several_files(data: st.DataObject, tmp_path_factory: Any) -> None:
    sizes = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=6))
    folder = tmp_path_factory.mktemp("ranges")
    whole = b""
    for number, nbytes in enumerate(sizes):
        (folder / f"f{number}").write_bytes(content(str(number), nbytes))
        whole += content(str(number), nbytes)
    storage = Storage(tries=1, pause=0)
    files = Files(storage.find(f"{folder}/f{{0..{len(sizes) - 1}}}"))
    for _ in range(5):
        start = data.draw(st.integers(0, len(whole)))
        nbytes = data.draw(st.integers(0, len(whole) - start))
        parts = [
            read(storage, files[number], offset, length)
            for number, offset, length in files.parts(start, nbytes)
        ]
        assert b"".join(parts) == whole[start : start + nbytes]
    storage.close()


def test_a_local_file_that_changed(storage: Storage, folder: Path) -> None:
    path = folder / "b.tar"
    [file] = storage.find(path)
    os.utime(path, ns=(9, int(file.version) + 1))
    with pytest.raises(DataError, match=r"b\.tar, bytes 10 to 60: the file has changed"):
        read(storage, file, 10, 50)  # nor before the first read
    os.utime(path, ns=(9, int(file.version)))
    assert read(storage, file, 10, 50) == content("b.tar", 1000)[10:60]
    for change in (b"x" * 999, b"x" * 1001, b""):
        path.write_bytes(change)
        told = (
            rf"b\.tar, bytes 10 to 60: the file has {len(change)} bytes and had 1000 [^,]*, or .*n$"
        )
        with pytest.raises(DataError, match=told):
            read(storage, file, 10, 50)
    path.write_bytes(content("a.tar", 1000))
    os.utime(path, (9, 9))
    with pytest.raises(DataError, match=r"b\.tar, bytes 0 to 9: the file has changed: its version"):
        read(storage, file, 0, 9)
    os.utime(path, ns=(9, int(file.version)))
    assert read(storage, file, 0, 1000) == content("a.tar", 1000)
    with pytest.raises(ValueError, match="it has 1000"):
        read(storage, file, 990, 11)
    storage.close()
    for replace in (Path.unlink, os.mkfifo):  # none is waited for
        replace(path)
        with pytest.raises((DataError, ClosedError), match=r"b\.tar, bytes 0 to 1: "):
            read(Storage(tries=2, pause=0), file, 0, 1)


def test_a_local_file_that_is_opened_again(
    storage: Storage, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [file] = storage.find(folder / "b.tar")
    fill, failed = Descriptor.fill, []

    def stale(self: Descriptor, offset: int, out: memoryview) -> bool:
        if not failed:
            failed.append(self)
        if self is failed[0]:  # for ever, as a network's file system does
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fill(self, offset, out)

    monkeypatch.setattr(Descriptor, "fill", stale)
    assert read(storage, file, 5, 10) == content("b.tar", 1000)[5:15]


def test_threads_read_more_files_than_are_open(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / str(number)).write_bytes(content(str(number), 100))
    descriptors = Descriptors(2)

    def right(number: int) -> bool:
        out = memoryview(bytearray(50))
        descriptor = descriptors.get(str(tmp_path / str(number % 20)))
        return descriptor.fill(25, out) and out == content(str(number % 20), 100)[25:75]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(right, range(2000)))
    assert open_below(tmp_path) == 2
    descriptors.close()
    assert open_below(tmp_path) == 0


def open_below(folder: Path) -> int:
    """How many files below a folder this process has open."""
    links = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
    return sum(link.startswith(f"{folder}/") for link in links)


# A server


def test_a_servers_folder_and_patterns(storage: Storage, server: StorageServer) -> None:
    url = server.url
    files = storage.find(f"{url}/")
    assert names(files, url) == VISIBLE
    assert [file.nbytes for file in files] == [300, 1000, 7, 0, 12]
    for folder in (f"{url}/sub", f"{url}/sub/"):
        assert [file.name[file.root :] for file in storage.find(folder)] == [
            "x-0002.bin",
            "x-0010.bin",
        ]
    assert names(storage.find(f"{url}/*.tar"), url) == ["a.tar", "b.tar"]
    assert names(storage.find(f"{url}/*/x-*"), url) == ["sub/x-0002.bin", "sub/x-0010.bin"]
    assert names(storage.find(f"{url}/**/*.tar"), url) == VISIBLE[:3]
    assert names(storage.find(f"{url}/sub/x-0{{002..002}}.bin"), url) == ["sub/x-0002.bin"]
    assert names(storage.find([f"{url}/b.tar", f"{url}/sub"]), url) == ["b.tar", *VISIBLE[3:]]
    assert only(storage.find(f"{url}/a.tar?key=1")) == (f"{url}/a.tar?key=1", 300)
    for wrong in (f"{url}/c.tar", f"{url}/*.zip", f"{url}/nothing/"):
        with pytest.raises(DataError, match=wrong.replace("*", r"\*")):
            storage.find(wrong)
    for file in files:
        expected = content(file.url.removeprefix(f"{url}/"), file.nbytes)
        assert read(storage, file, 0, file.nbytes) == expected
        assert (
            read(storage, file, file.nbytes // 3, file.nbytes // 2)
            == (expected[file.nbytes // 3 :][: file.nbytes // 2])
        )
    assert server.nbytes["/b.tar"] == 1000 + 500
    assert server.requests["/b.tar"] == 2  # no size is asked with a GET


def test_names_on_a_server_are_those_of_its_folder(
    storage: Storage, folder: Path, server: StorageServer
) -> None:
    """Their order, too, though a server lists and sorts them encoded."""
    for name in ("éel/a b.png", "cat/x.png", "my file-1.npy", "50%.npy", "sub/.é/x"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(name.encode())
    there = storage.find(f"{server.url}/")
    wanted = names(storage.find(folder), folder)
    assert [file.name.removeprefix(f"{server.url}/") for file in there] == wanted
    assert wanted[-1] == "éel/a b.png" and read(storage, there[-1], 0, 4) == "éel".encode()
    for pattern in ("my file*.npy", "my%20file*.npy", "my*"):
        [file] = storage.find(f"{server.url}/{pattern}")
        assert read(storage, file, 0, 13) == b"my file-1.npy"


def test_a_signature_is_no_part_of_a_name(storage: Storage, server: StorageServer) -> None:
    url = f"{server.url}/a.tar?X-Sig=abc/def/"
    server.faults["/a.tar?X-Sig=abc/def/"] = Faults(errors=ALWAYS, status=403)
    for call in (lambda: storage.find(url), lambda: read(storage, File(url, 300), 0, 9)):
        with pytest.raises(DataError, match=r"/a\.tar[:,].*403") as caught:
            call()
        assert "X-Sig" not in str(caught.value)
    with pytest.raises(DataError, match=r"/\*\.zip: no file"):
        storage.find(f"{server.url}/*.zip?X-Sig=abc")
    server.faults["/a.tar?X-Sig=abc/def/"] = Faults()
    assert only(storage.find(url)) == (url, 300)


def test_a_listing_that_fails_is_asked_for_again(storage: Storage, server: StorageServer) -> None:
    server.faults["/"] = Faults(errors=2)
    server.faults["/sub/"] = Faults(errors=1, status=503)
    server.faults["/sub/x-0002.bin"] = Faults(errors=3)  # of HEAD, GET, HEAD
    assert names(storage.find(f"{server.url}/"), server.url) == VISIBLE
    server.faults["/sub/"] = Faults(errors=ALWAYS)
    with pytest.raises(DataError, match=r"/sub/: .*500.*after 3 tries"):
        storage.find(f"{server.url}/")
    server.faults["/a.tar"] = Faults(errors=ALWAYS, status=503)
    with pytest.raises(DataError, match=r"/a\.tar: .*503.*after 3 tries"):
        storage.find([f"{server.url}/a.tar", f"{server.url}/b.tar"])
    server.faults["/a.tar"] = Faults(no_size=True)
    with pytest.raises(DataError, match="does not tell its size"):
        storage.find(f"{server.url}/*.tar")


def test_threads_share_a_storage(storage: Storage, server: StorageServer) -> None:
    files = storage.find([f"{server.url}/a.tar", f"{server.url}/b.tar"])
    server.faults["/b.tar"] = Faults(errors=2)

    def right(number: int) -> bool:
        file, whole = files[number % 2], content(("a.tar", "b.tar")[number % 2], 1000)
        return read(storage, file, number, 50) == whole[number : number + 50]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(right, range(100)))
    assert server.requests["/a.tar"] + server.requests["/b.tar"] == 102


def test_an_interrupt_waits_for_no_other_call() -> None:
    held, ended = threading.Event(), []

    def call(item: int) -> None:
        if not item:
            raise KeyboardInterrupt
        held.wait(PATIENCE)
        ended.append(item)

    with pytest.raises(KeyboardInterrupt):
        at_once(call, range(20))
    assert not ended
    held.set()
    names = [each.name for each in threading.enumerate() if each.daemon]
    assert any(name.startswith("pgasdl-storage_") for name in names)  # Python waits for none
    held.set()


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_errors_are_tried_again(storage: Storage, server: StorageServer, status: int) -> None:
    [file] = storage.find(f"{server.url}/b.tar")
    server.faults["/b.tar"] = Faults(errors=2, status=status)
    assert read(storage, file, 3, 5) == content("b.tar", 1000)[3:8]
    assert server.requests["/b.tar"] == 3
    server.faults["/b.tar"] = Faults(errors=ALWAYS, status=status)
    told = rf"{server.url}/b\.tar, bytes 3 to 8: .*{status}.*, after 3 tries"
    with pytest.raises(DataError, match=told):
        read(storage, file, 3, 5)
    assert server.requests["/b.tar"] == 6


@pytest.mark.parametrize("status", [403, 404])
def test_refusals_are_not_tried_again(storage: Storage, server: StorageServer, status: int) -> None:
    [file] = storage.find(f"{server.url}/b.tar")
    server.faults["/b.tar"] = Faults(errors=1, status=status)
    with pytest.raises(DataError, match=r"/b\.tar, bytes 3 to 8: .*, after 1 try"):
        read(storage, file, 3, 5)
    assert server.requests["/b.tar"] == 1
    server.faults["/b.tar"] = Faults(errors=2, status=status)  # HEAD, and fsspec's GET
    with pytest.raises(DataError, match=rf"/b\.tar: .*{status}.*, after 1 try"):
        storage.find(f"{server.url}/b.tar")


def test_an_answer_that_breaks_off(storage: Storage, server: StorageServer) -> None:
    [file] = storage.find(f"{server.url}/b.tar")
    server.faults["/b.tar"] = Faults(breaks=2, break_after=100)
    assert read(storage, file, 0, 1000) == content("b.tar", 1000)
    assert server.requests["/b.tar"] == 3 and server.nbytes["/b.tar"] == 1200
    server.faults["/b.tar"] = Faults(breaks=ALWAYS, break_after=100)
    with pytest.raises(DataError, match=r"bytes 0 to 1000: .*after 3 tries"):
        read(storage, file, 0, 1000)
    # Without a length, only the count of the bytes tells it.
    server.faults["/b.tar"] = Faults(breaks=2, break_after=100, no_size=True)
    assert read(storage, file, 0, 1000) == content("b.tar", 1000)


def test_a_server_that_ignores_ranges(
    storage: Storage, server: StorageServer, caplog: pytest.LogCaptureFixture
) -> None:
    [file] = storage.find(f"{server.url}/b.tar")
    server.faults["/b.tar"] = Faults(ignore_range=True)
    assert read(storage, file, 990, 10) == content("b.tar", 1000)[990:]
    assert read(storage, file, 0, 10) == content("b.tar", 1000)[:10]
    assert [record.getMessage() for record in caplog.records] == [
        f"{file.url}: the server sends whole files where ranges are wanted"
    ]
    with pytest.raises(DataError, match="1000 bytes came; the file was listed with 999, after 3"):
        read(storage, File(file.url, 999), 5, 10)


def test_a_server_that_sends_another_range(storage: Storage, server: StorageServer) -> None:
    [file] = storage.find(f"{server.url}/b.tar")
    server.faults["/b.tar"] = Faults(shift=4)
    with pytest.raises(DataError, match=r"bytes 3 to 8: .* 'bytes 7-11/1000' came, after 3 tries"):
        read(storage, file, 3, 5)


@pytest.mark.parametrize("adds", [-10, 10])
def test_a_server_that_lies_about_sizes(storage: Storage, server: StorageServer, adds: int) -> None:
    server.faults["/b.tar"] = Faults(head_adds=adds)
    [file] = storage.find(f"{server.url}/b.tar")
    assert file.nbytes == 1000 + adds
    assert read(storage, file, 0, 900) == content("b.tar", 1000)[:900]
    if adds > 0:
        with pytest.raises(DataError, match=r"bytes 995 to 1005: .*5 bytes came.* after 3 tries"):
            read(storage, file, 995, 10)
        with pytest.raises(DataError, match=r"bytes 1001 to 1005: .*416.* after 3 tries"):
            read(storage, file, 1001, 4)


@pytest.mark.parametrize("header", ["ETag", "Last-Modified"])
def test_a_file_that_changes_on_a_server(
    storage: Storage, folder: Path, server: StorageServer, header: str
) -> None:
    """Neither before its first read, nor between two, does another version come."""
    old, new = {"ETag": ('"a"', '"b"')}.get(header, ("Sun, 29 Nov 2026", "Mon, 30 Nov 2026"))
    faults = server.faults["/b.tar"] = Faults(version=(header, old))
    [file] = storage.find(f"{server.url}/b.tar")
    assert file.version == old
    faults.version = (header, new)
    with pytest.raises(DataError, match=f"bytes 3 to 8: the file has changed.* {new}, was {old}"):
        read(storage, file, 3, 5)
    assert server.requests["/b.tar"] == 1  # nor is it tried again
    for same in (old, f"W/{old}") if header == "ETag" else (old,):
        faults.version = (header, same)
        assert read(storage, file, 3, 5) == content("b.tar", 1000)[3:8]
    faults.version = None  # nothing is told
    assert read(storage, file, 3, 5) == content("b.tar", 1000)[3:8]
    unknown = File(file.url, 1000)
    other = Storage(tries=1)
    for version, right in ((old, True), (new, False)):
        faults.version = (header, version)
        if right:
            assert read(other, unknown, 3, 5) == content("b.tar", 1000)[3:8]
        else:
            with pytest.raises(DataError, match="has changed"):
                read(other, unknown, 3, 5)
    other.close()


def test_a_server_that_stalls_is_left(server: StorageServer) -> None:
    storage = Storage(tries=2, pause=0, timeout=0.1)
    [file] = storage.find(f"{server.url}/b.tar")
    threads = set(threading.enumerate())
    server.faults["/b.tar"] = Faults(stalls=2)
    with pytest.raises(DataError, match=r"bytes 0 to 9: .*no answer within 0.1 s, after 2 tries"):
        read(storage, file, 0, 9)
    for _ in range(2):  # each connection is gone
        assert server.stalled.acquire(timeout=PATIENCE) and server.hung_up.acquire(timeout=PATIENCE)
    assert not [
        each for each in set(threading.enumerate()) - threads if "process_request" not in each.name
    ]
    server.faults["/b.tar"] = Faults(stalls=1)
    assert read(storage, file, 0, 9) == content("b.tar", 1000)[:9]
    storage.close()


def test_a_stall_that_ends_in_time(storage: Storage, server: StorageServer) -> None:
    [file] = storage.find(f"{server.url}/b.tar")
    server.faults["/b.tar"] = Faults(stalls=1)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(read, storage, file, 0, 9)
        assert server.stalled.acquire(timeout=PATIENCE)
        server.release()
        assert got.result(PATIENCE) == content("b.tar", 1000)[:9]
    assert server.requests["/b.tar"] == 1


def test_a_server_that_is_gone(storage: Storage, folder: Path) -> None:
    pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    with StorageServer(folder) as server:
        [file] = storage.find(f"{server.url}/b.tar")
    with pytest.raises(DataError, match=r"b\.tar, bytes 0 to 9: .*Connect.*, after 3 tries"):
        read(storage, file, 0, 9)
    with pytest.raises(DataError, match=r"b\.tar: .*Connect.*, after 3 tries"):
        storage.find(file.url)


def test_a_pause_ends_when_the_storage_is_closed(server: StorageServer) -> None:
    storage = Storage(tries=3, pause=1e6)
    [file] = storage.find(f"{server.url}/b.tar")
    server.faults["/b.tar"] = Faults(errors=ALWAYS)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(read, storage, file, 0, 9)
        assert until(lambda: server.requests["/b.tar"] == 1)
        storage.close()
        with pytest.raises(ClosedError, match=r"b\.tar, bytes 0 to 9: the storage is closed"):
            got.result(PATIENCE)


# Other protocols


def test_a_protocol_of_fsspec_that_is_not_asynchronous(storage: Storage) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    try:
        for name in ("b.bin", "a.bin", "sub/c.bin", ".hidden"):
            memory.pipe_file(f"/pgasdl/{name}", content(name, 50))
        files = storage.find("memory://pgasdl")
        assert names(files, "memory://pgasdl") == ["a.bin", "b.bin", "sub/c.bin"]
        assert names(storage.find("memory://pgasdl/[ax]*"), "memory://pgasdl") == ["a.bin"]
        assert storage.find("memory://pgasdl/a.bin") == files[:1]
        assert read(storage, files[2], 20, 30) == content("sub/c.bin", 50)[20:]
        with pytest.raises(DataError, match=r"nothing: FileNotFoundError.*after 1 try"):
            storage.find("memory://pgasdl/nothing")
    finally:
        memory.rm("/pgasdl", recursive=True)


def test_such_a_protocol_that_stalls_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    released = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *_, **__: released.wait(PATIENCE))
    storage = Storage(tries=2, pause=0, timeout=0.05)
    with pytest.raises(DataError, match=r"no answer within 0.05 s, after 2 tries"):
        read(storage, File("memory://a", 9), 0, 9)
    left = [each for each in threading.enumerate() if each.name == "pgasdl-storage"]
    assert len(left) == 2
    released.set()
    for thread in left:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_what_is_not_installed(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(DataError, match="nonsense://a/b: Protocol not known"):
        storage.find("nonsense://a/b")
    install = r"pip install 'pgasdl\[data\]'"
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UnavailableError, match=r"s3://a/b: Install s3fs[^)]*$"):
        storage.find("s3://a/b")
    for name in ("fsspec.core", "fsspec"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (
        lambda: storage.find("http://127.0.0.1/a"),
        lambda: read(storage, File("http://127.0.0.1/a", 9), 0, 9),
    ):
        with pytest.raises(UnavailableError, match=f"fsspec.*{install}"):
            call()


def test_pauses_are_twice_as_long_each_time(
    server: StorageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(tries=4, pause=0.25)
    [file] = storage.find(f"{server.url}/b.tar")
    waited: list[float] = []

    class Clock:
        def wait(self, seconds: float) -> bool:
            waited.append(seconds)
            return False

        def is_set(self) -> bool:
            return False

    monkeypatch.setattr(storage, "_closed", Clock())
    server.faults["/b.tar"] = Faults(errors=ALWAYS)
    with pytest.raises(DataError, match="after 4 tries"):
        read(storage, file, 0, 9)
    assert waited == [0.25, 0.5, 1]
