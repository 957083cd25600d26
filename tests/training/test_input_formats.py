"""Formats of records, beside the libraries that write and read them."""

from __future__ import annotations

import gc
import gzip
import io
import itertools
import os
import sys
import tarfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pgasdl import DataError, PeerLost, UnavailableError
from pgasdl.input.files import File, Files
from pgasdl.input.formats import FORMATS, Format, format_of


class Memory:
    """Files in memory, and what was read of them."""

    def __init__(self, *contents: bytes, urls: list[str] | None = None) -> None:
        urls = urls or [f"s3://bucket/{number}" for number in range(len(contents))]
        self.files = Files([File(url, len(c)) for url, c in zip(urls, contents, strict=True)])
        self.data = b"".join(contents)
        self.reads: list[tuple[int, int]] = []

    def read(self, address: int, nbytes: int) -> memoryview:
        assert 0 <= address < address + nbytes <= len(self.data)
        self.reads.append((address, nbytes))
        return memoryview(self.data)[address : address + nbytes]

    def open(self, format: str) -> Format:
        kind = FORMATS[format]
        tables = [kind.scan(self.files, number, self.read) for number in range(len(self.files))]
        for array in itertools.chain.from_iterable(table.values() for table in tables):
            assert isinstance(array, np.ndarray) and not array.dtype.hasobject
        self.reads.clear()
        return kind(self.files, tables)

    def records(self, format: str) -> list[dict[str, Any]]:
        """All records; each reads no more than its ranges."""
        opened = self.open(format)
        result = []
        for row in range(len(opened)):
            self.reads.clear()
            result.append(opened.record(row, self.read))
            for address, nbytes in self.reads:
                assert any(
                    a <= address and address + nbytes <= a + n for a, n in opened.ranges(row)
                )
        return result


# Addresses.


@given(st.lists(st.binary(max_size=5), min_size=1, max_size=7), st.data())
def test_addresses_are_places_in_all_files_one_after_another(
    contents: list[bytes], data: st.DataObject
) -> None:
    memory = Memory(*contents)
    files, whole = memory.files, memory.data
    assert files.nbytes == len(whole) and len(files) == len(contents)
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    parts = list(files.parts(begin, end - begin))
    assert all(length > 0 for _, _, length in parts)
    assert b"".join(contents[n][at : at + length] for n, at, length in parts) == whole[begin:end]
    for address in range(len(whole)):
        number, offset = files.locate(address)
        assert 0 <= offset < len(contents[number])
        assert len(b"".join(contents[:number])) + offset == address
        assert files.place(address) == f"s3://bucket/{number}, byte {offset}"
    for wrong in ((-1, 1), (begin, len(whole) - begin + 1), (begin, -1)):
        with pytest.raises(ValueError, match=f"there are {len(whole)}"):
            list(files.parts(*wrong))


def test_the_digest_is_of_names_sizes_and_versions() -> None:
    sets: list[list[Any]] = [
        [("a", 1)],
        [("a", 2)],
        [("b", 1)],
        [("a", 1), ("b", 1)],
        [("b", 1), ("a", 1)],
    ]
    sets.append([("a", 1, "yesterday")])
    digests = [Files([File(*file) for file in files]).digest for files in sets]
    assert len(set(digests)) == len(sets)
    assert Files([File("a", 1)]).digest == digests[0]


def test_names_say_the_format() -> None:
    def named(*names: str) -> str:
        return format_of(Files([File(name, 1) for name in names]))

    assert named("a/0.tar", "s3://b/1.TAR") == named("x.tar.gz") == "tar"
    assert named("https://host/0.parquet") == "parquet"
    assert named("cats/1.JPEG", "dogs/2.png") == "folder"
    with pytest.raises(ValueError, match="0 files"):
        named()
    for names in (["a.tar", "b.tar", "c.parquet"], ["a.tar", "b.tar", "x/LICENSE"], ["a.zip"]):
        with pytest.raises(ValueError, match="wanted files of one format") as caught:
            named(*names)
        there = [f"{names.count('a.tar') + names.count('b.tar')} *.tar"] if len(names) > 1 else []
        rest = {"c.parquet": "1 *.parquet", "x/LICENSE": "1 license", "a.zip": "1 *.zip"}[names[-1]]
        for word in (*there, rest):
            assert word in str(caught.value)


# Tars.

FORMATS_OF_TARS = {
    "ustar": tarfile.USTAR_FORMAT,
    "gnu": tarfile.GNU_FORMAT,
    "pax": tarfile.PAX_FORMAT,
}
Member = tuple[str, bytes | None]  # None: a folder


def tar_of(members: list[Member], format: int = tarfile.GNU_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format, encoding="utf-8") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content or b""))
    return out.getvalue()


def by_webdataset(path: Path) -> list[dict[str, Any]]:
    webdataset = pytest.importorskip("webdataset")
    samples = webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False)
    own = ("__url__", "__local_path__")
    return [{key: value for key, value in s.items() if key not in own} for s in samples]


def in_order(records: list[dict[str, Any]]) -> list[list[tuple[str, Any]]]:
    return [list(record.items()) for record in records]


# Names of few parts, so that keys meet.
PARTS = st.sampled_from(
    [
        "a",
        "b",
        ".",
        "..",
        ".jpg",
        ".CLS",
        ".seg.png",
        "/",
        "./",
        "x.y/",
        "__m__",
        "_",
        "é",
        "\n",
        "ß",
    ]
)
NAMES = st.one_of(
    st.builds("{}.{}".format, st.sampled_from(["a", "d/a", "d.e/b"]), st.sampled_from("pqrPQ")),
    st.lists(PARTS, min_size=1, max_size=5).map("".join),
    st.builds(
        "{}{}".format, st.sampled_from(["n" * 99, "m/" * 80]), st.sampled_from([".j", "b.k"])
    ),
).filter(lambda name: name.strip("/"))
SIZES = st.sampled_from([0, 1, 511, 512, 513, 1500])


@settings(max_examples=100)
@given(
    st.lists(st.tuples(NAMES, st.one_of(st.none(), SIZES)), max_size=9),
    st.sampled_from(["gnu", "pax"]),
)
@example([("a/.hidden", 3), ("__m__", 2), ("__m__/a.jpg", 2), ("a.x/.b", 1), ("a.", 1)], "gnu")
@example([("a.jpg", 3), ("README", 2), ("d", None), ("a.cls", 1), ("b.JPG", 1)], "pax")
@example([("\udce9.jpg", 1)], "gnu")  # a byte that is no UTF-8
@example([("a.jpg", 1), ("a.JPG", 1)], "gnu")
@example([("a.jpg", 1), ("a.__key__", 1)], "gnu")
def test_tars_are_to_us_what_they_are_to_webdataset(
    tmp_path_factory: pytest.TempPathFactory, names: list[tuple[str, int | None]], format: str
) -> None:
    members: list[Member] = [
        (name, None if size is None else bytes([number]) * size)
        for number, (name, size) in enumerate(names)
    ]
    data = tar_of(members, FORMATS_OF_TARS[format])
    path = tmp_path_factory.getbasetemp() / "hypothesis.tar"
    path.write_bytes(data)
    memory = Memory(data, urls=[str(path)])
    try:
        wanted = by_webdataset(path)
    except ValueError as error:
        assert "duplicate file name" in str(error)
        with pytest.raises(DataError, match=f"{path}, byte .* already"):
            memory.open("tar")
    else:
        assert in_order(memory.records("tar")) == in_order(wanted)


def test_shards_of_webdatasets_writer(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    samples = [
        {"__key__": f"{'folder/' * 20}{n:04d}", "jpg": bytes([n]) * 700 * n, "cls": b"%d" % n}
        for n in range(9)
    ]
    samples[5]["seg.png"] = b"png"  # a field that one sample has
    paths = [tmp_path / f"{number}.tar" for number in range(4)]
    for path, mine in zip(paths, (samples[:2], [], samples[2:7], samples[7:]), strict=True):
        with webdataset.TarWriter(str(path), encoder=False) as writer:
            for sample in mine:
                writer.write(sample)
    memory = Memory(*(path.read_bytes() for path in paths), urls=[str(path) for path in paths])
    assert memory.records("tar") == samples
    opened: Any = memory.open("tar")
    assert len(opened) == 9 and opened.extensions == ["cls", "jpg", "seg.png"]


@pytest.mark.parametrize("format", FORMATS_OF_TARS)
def test_links_and_devices_are_no_fields(format: str) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=FORMATS_OF_TARS[format]) as tar:
        for name, kind in (
            ("a.jpg", tarfile.REGTYPE),
            ("a.link", tarfile.SYMTYPE),
            ("a.hard", tarfile.LNKTYPE),
            ("a.pipe", tarfile.FIFOTYPE),
            ("a.cls", tarfile.AREGTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.jpg"
            info.size = 3 if kind in (tarfile.REGTYPE, tarfile.AREGTYPE) else 0
            tar.addfile(info, io.BytesIO(b"abc"))
    assert Memory(out.getvalue()).records("tar") == [{"__key__": "a", "jpg": b"abc", "cls": b"abc"}]


def test_the_scan_of_a_tar_reads_headers_only() -> None:
    members: list[Member] = [(f"{n:03d}.{e}", bytes(50_000)) for n in range(40) for e in "ab"]
    memory = Memory(tar_of(members))
    alive = []

    def read(address: int, nbytes: int) -> memoryview:
        if len(memory.reads) in (0, 70):
            alive.append(sum(type(object) is tarfile.TarInfo for object in gc.get_objects()))
        return memory.read(address, nbytes)

    FORMATS["tar"].scan(memory.files, 0, read)
    assert alive[1] - alive[0] <= 3  # of the members' descriptions; the table has the rest
    assert sum(nbytes for _, nbytes in memory.reads) <= (len(members) + 1) * 1024
    assert len(memory.reads) <= len(members) + 2


SMALL: list[Member] = [("a.jpg", b"x" * 600), ("a.cls", b"1"), ("dir/b.jpg", b""), ("b.txt", b"z")]


@pytest.mark.parametrize("format", FORMATS_OF_TARS)
def test_a_tar_that_was_cut_is_refused(format: str) -> None:
    whole = tar_of([*SMALL, ("n/" * 45 + "b.jpg", b"abc")], FORMATS_OF_TARS[format])
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        last = tar.getmembers()[-1]
    end = last.offset_data + 512
    wanted = Memory(whole).records("tar")
    for length in (*range(0, end, 64), *range(511, end, 512), end, end + 511):
        with pytest.raises(DataError, match=r"^s3://bucket/1, byte \d+: a damaged tar"):
            Memory(whole, whole[:length], whole).open("tar")
    assert Memory(whole[: end + 512]).records("tar") == wanted


@pytest.mark.parametrize("format", FORMATS_OF_TARS)
def test_a_damaged_header_is_found(format: str) -> None:
    whole = tar_of(SMALL, FORMATS_OF_TARS[format])
    wanted = Memory(whole).records("tar")
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        starts = [member.offset for member in tar] + [tar.offset]
    found = 0
    for start in starts:
        for byte in range(start, start + 512, 3):
            damaged = bytearray(whole)
            damaged[byte] ^= 1 << byte % 8
            try:
                assert Memory(bytes(damaged)).records("tar") == wanted  # padding of its checksum
            except DataError as error:
                found += 1
                assert str(error).startswith(f"s3://bucket/0, byte {start}: ") or start == starts[0]
    assert found >= 168 * len(starts)


@given(st.lists(st.tuples(st.integers(0, 6000), st.integers(1, 255)), min_size=1, max_size=4))
def test_whatever_is_damaged_raises_only_data_errors(flips: list[tuple[int, int]]) -> None:
    damaged = bytearray(tar_of([("é.jpg", b"x"), *SMALL], tarfile.PAX_FORMAT))
    for place, bits in flips:
        damaged[place] ^= bits
    try:
        Memory(bytes(damaged)).records("tar")
    except DataError as error:
        assert "s3://bucket/0, byte" in str(error)


def crafted(size: bytes) -> bytes:
    """A tar whose first header has this size field."""
    header = bytearray(tar_of(SMALL)[:512])
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + tar_of(SMALL)[512:]


@pytest.mark.parametrize(
    "size", [b"-00000001000", b"77777777777\0", b"\xff" * 12, b"\x80" + b"\x7f" * 11]
)
def test_sizes_that_cannot_be_are_refused(size: bytes) -> None:
    assert Memory(crafted(b"00000001130\0")).records("tar") == Memory(tar_of(SMALL)).records("tar")
    with pytest.raises(DataError, match="s3://bucket/0, byte 0: a damaged tar"):
        Memory(crafted(size)).open("tar")


def test_tars_that_cannot_be_read_from_anywhere_are_refused() -> None:
    whole = tar_of(SMALL)
    with pytest.raises(DataError, match=r"bucket/0 is compressed.*gunzip"):
        Memory(gzip.compress(whole)).open("tar")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("a.bin")
        info.pax_headers = {"GNU.sparse.map": "5,1", "GNU.sparse.size": "9"}
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    with pytest.raises(DataError, match=r"bucket/0, byte .*sparse"):
        Memory(out.getvalue()).open("tar")


# Folders.


def test_a_folder_is_what_a_walk_finds(tmp_path: Path) -> None:
    root = tmp_path / "set"
    names = [
        "b/1.JPEG",
        "b/x.y.png",
        "a/2/3.jpg",
        "a/2/3.png",
        "c d/empty.png",
        "a/none",
        "top.jpg",
    ]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"" if "empty" in name else name.encode())
    wanted = []
    for folder, folders, files in os.walk(root):
        if folder == str(root):
            classes = sorted(folders)
        for file in files:
            path = os.path.join(folder, file)
            key, extension = os.path.splitext(os.path.relpath(path, root))
            record = {"__key__": key, extension[1:].lower(): Path(path).read_bytes()}
            if os.sep in key:
                record["cls"] = classes.index(key.split(os.sep)[0])
            wanted.append((path, record))
    wanted.sort()
    assert len(wanted) == len(names)
    paths = [path for path, _ in wanted]
    memory = Memory(*(Path(path).read_bytes() for path in paths), urls=paths)
    assert memory.records("folder") == [record for _, record in wanted]
    opened: Any = memory.open("folder")
    assert opened.classes == classes == ["a", "b", "c d"] and len(opened) == len(names)


@pytest.mark.parametrize(
    ("urls", "keys", "labels"),
    [
        (["s3://b/a/x.png", "s3://b/a/y.png"], ["x", "y"], [None, None]),
        (["s3://b/a/x.png", "s3://b/c/x.png"], ["a/x", "c/x"], [0, 1]),
        (["s3://b/ab/x.png", "s3://b/a/x.png"], ["ab/x", "a/x"], [1, 0]),
        (["s3://b/a/p/x.png", "s3://b/a/q/r/x.png"], ["p/x", "q/r/x"], [0, 1]),
        (["s3://b/a/x.png", "s3://b/a/q/x.png"], ["x", "q/x"], [None, 0]),
        (["x.png", "y.png"], ["x", "y"], [None, None]),
        (["/x.png", "/a/y.png"], ["x", "a/y"], [None, 0]),
    ],
)
def test_the_root_is_the_deepest_folder_of_all(
    urls: list[str], keys: list[str], labels: list[int | None]
) -> None:
    records = Memory(*(b"x" for _ in urls), urls=urls).records("folder")
    assert [record["__key__"] for record in records] == keys
    assert [record.get("cls") for record in records] == labels


# Parquet.


def table_of(count: int) -> Any:
    pa = pytest.importorskip("pyarrow")
    rows = range(count)
    return pa.table(
        {
            "number": pa.array(rows, pa.int32()),
            "name": pa.array([None if n % 5 == 0 else f"é{n}" for n in rows]),
            "image": pa.array([{"bytes": bytes([n % 251]) * n, "path": None} for n in rows]),
            "box": pa.array([[0.5 * n, 1.0, 2.0] for n in rows], pa.list_(pa.float32(), 3)),
            "tokens": pa.array([list(range(n % 7)) for n in rows], pa.list_(pa.int64())),
            "gaps": pa.array(
                [[n, None] if n % 2 else None for n in rows], pa.large_list(pa.int16())
            ),
            "words": pa.array([["a", "b"] * (n % 3) for n in rows]),
            "nested": pa.array([[[n % 99], [2, 1]] for n in rows], pa.list_(pa.list_(pa.int8()))),
            "parts": pa.array([[{"x": [True, False], "y": b"z"}] for n in rows]),
            "colour": pa.array([("red", "blue")[n % 2] for n in rows]).dictionary_encode(),
            "pairs": pa.array([[("k", n)] for n in rows], pa.map_(pa.string(), pa.int64())),
        }
    )


def parquet_of(table: Any, **options: Any) -> bytes:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = io.BytesIO()
    parquet.write_table(table, out, **options)
    return out.getvalue()


def plain(value: Any) -> Any:
    """As ``to_pylist`` has it."""
    if isinstance(value, np.ndarray):
        assert value.flags.writeable and value.dtype != object
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(field) for key, field in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "none", "use_dictionary": False},
        {"compression": "zstd", "data_page_version": "2.0"},
        {"compression": "snappy", "write_page_checksum": True, "write_page_index": True},
        {"compression": "gzip", "data_page_size": 64},
    ],
)
@pytest.mark.parametrize("group", [1, 7, 100])
def test_parquet_is_to_us_what_it_is_to_pyarrow(group: int, options: dict[str, Any]) -> None:
    tables = [table_of(count) for count in (13, 0, 20)]
    memory = Memory(*(parquet_of(table, row_group_size=group, **options) for table in tables))
    records = memory.records("parquet")
    wanted = [row for table in tables for row in table.to_pylist()]
    assert [plain(record) for record in records] == wanted
    assert list(records[0]) == tables[0].column_names
    one = records[12]
    assert one["box"].dtype == np.float32 and one["tokens"].dtype == np.int64
    assert one["nested"][1].dtype == np.int8 and one["parts"][0]["x"].dtype == bool


def test_the_scan_of_parquet_reads_the_footer_only() -> None:
    data = parquet_of(table_of(300), row_group_size=100)
    memory = Memory(b"xyz", data)
    table = FORMATS["parquet"].scan(memory.files, 1, memory.read)
    end = 3 + len(data)
    assert list(table["rows"]) == [100, 100, 100]
    assert sum(nbytes for _, nbytes in memory.reads) <= len(table["footer"]) + 8 < len(data) // 2
    assert all(address >= end - len(table["footer"]) for address, _ in memory.reads)
    # Row groups lie one behind another, between the magic word and the footer.
    begins, ends = table["offset"], table["offset"] + table["nbytes"]
    assert begins[0] == 4 and list(begins[1:]) == list(ends[:-1])
    assert ends[-1] <= len(data) - len(table["footer"])


def test_some_row_groups_are_kept() -> None:
    memory = Memory(parquet_of(table_of(12), row_group_size=2))
    opened = memory.open("parquet")

    def read(row: int) -> bool:
        memory.reads.clear()
        assert opened.record(row, memory.read)["number"] == row
        return bool(memory.reads)

    assert [read(row) for row in (0, 1, 2, 4, 6, 1, 7)] == [*(1, 0, 1, 1, 1), 0, 0]
    assert read(8) and not read(0) and read(2)  # the group of row 2 was used the longest ago


def in_threads(*calls: Callable[[], Any]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_decode_a_row_group_once() -> None:
    memory = Memory(parquet_of(table_of(10)))
    opened = memory.open("parquet")
    opened.record(0, memory.read)
    once = list(memory.reads)
    opened = memory.open("parquet")
    reading, second = threading.Event(), threading.Event()
    results = []

    def slow(address: int, nbytes: int) -> memoryview:
        reading.set()
        assert second.wait(60)
        return memory.read(address, nbytes)

    def other() -> None:
        assert reading.wait(60)
        second.set()
        results.append(opened.record(7, memory.read)["number"])

    in_threads(lambda: results.append(opened.record(3, slow)["number"]), other)
    assert sorted(results) == [3, 7] and memory.reads == once


@pytest.mark.parametrize("format", ["tar", "parquet"])
def test_an_error_of_reading_stays_as_it_is_and_is_not_kept(format: str) -> None:
    memory = Memory(tar_of(SMALL) if format == "tar" else parquet_of(table_of(10)))
    opened = memory.open(format)
    for error in (DataError("no such host"), PeerLost("rank 1", 1), KeyboardInterrupt("by hand")):

        def failing(
            address: int, nbytes: int, good: list[None], error: BaseException = error
        ) -> memoryview:
            if not good:
                raise error
            good.pop()
            return memory.read(address, nbytes)

        for n_good in (0, 1):
            with pytest.raises(type(error), match=f"^{error.args[0]}$"):
                FORMATS[format].scan(memory.files, 0, partial(failing, good=[None] * n_good))
        with pytest.raises(type(error), match=f"^{error.args[0]}$"):
            opened.record(0, partial(failing, good=[]))
    memory.reads.clear()
    assert list(opened.record(0, memory.read)) and memory.reads


def test_a_parquet_file_that_was_cut_or_is_none_is_refused() -> None:
    data = parquet_of(table_of(10))
    for length in (0, 4, 8, 12, len(data) // 2, len(data) - 1):
        with pytest.raises(DataError, match="s3://bucket/1, "):
            Memory(data, data[:length], data).open("parquet")
    for wrong in (b"\xff\xff\xff\x7fPAR1", b"\0\0\0\0PAR1", b"\1\0\0\0PAR1", b"\0\0\0\0PARE"):
        with pytest.raises(
            DataError, match=r"s3://bucket/1, .*(no footer|a damaged footer)"
        ) as caught:
            Memory(data, data[:-8] + wrong).open("parquet")
        assert ("no footer" in str(caught.value)) == (wrong[-4:] == b"PARE" or wrong[0] == 255)


def test_a_damaged_page_is_found() -> None:
    pa = pytest.importorskip("pyarrow")
    rows = pa.table({"x": [bytes([n]) * 300 for n in range(20)]})
    data = parquet_of(
        rows,
        row_group_size=10,
        write_page_checksum=True,
        write_statistics=False,
        compression="none",
        use_dictionary=False,
    )
    for n in range(10, 20):
        damaged = bytearray(data)
        damaged[data.index(bytes([n]) * 300) + 100] ^= 1
        memory = Memory(b"other", bytes(damaged))
        kind = FORMATS["parquet"]
        empty = {"rows": np.empty(0, int), "offset": np.empty(0, int), "nbytes": np.empty(0, int)}
        empty["footer"] = np.empty(0, np.uint8)
        opened = kind(memory.files, [empty, kind.scan(memory.files, 1, memory.read)])
        assert opened.record(0, memory.read) == {"x": bytes(300)}
        (address, _), *_ = opened.ranges(10)
        with pytest.raises(DataError, match=f"s3://bucket/1, byte {address - 5}: row group 1"):
            opened.record(10, memory.read)


def test_a_damaged_footer_raises_data_errors() -> None:
    pa = pytest.importorskip("pyarrow")
    data = parquet_of(pa.table({"x": [1, 2], "y": [["a"], []]}), row_group_size=1)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    messages = []
    for byte, bit in itertools.product(range(footer, len(data)), (0, 7)):
        damaged = bytearray(data)
        damaged[byte] ^= 1 << bit
        try:
            Memory(bytes(damaged)).open("parquet")  # pyarrow alone would end the process
        except DataError as error:
            messages.append(str(error))
    assert all(message.startswith("s3://bucket/0, ") for message in messages)
    assert any(" rows in bytes " in message for message in messages)


@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1))
def test_whatever_is_damaged_in_parquet_raises_only_data_errors(
    flips: list[tuple[float, int]],
) -> None:
    damaged = bytearray(parquet_of(table_of(9), row_group_size=5))
    for place, bits in flips:
        damaged[int(place * len(damaged))] ^= bits
    try:
        Memory(bytes(damaged)).records("parquet")
    except DataError as error:
        assert "s3://bucket/0, " in str(error)


def test_text_that_is_none_is_a_damaged_row() -> None:
    data = parquet_of(table_of(3), compression="none", use_dictionary=False)
    memory = Memory(data.replace("é2".encode(), b"\xff\xff2"))
    opened = memory.open("parquet")
    assert opened.record(1, memory.read)["name"] == "é1"
    with pytest.raises(DataError, match=r"s3://bucket/0, byte 4: row 2 of the row group: .*utf-8"):
        opened.record(2, memory.read)


def test_columns_of_one_name_are_refused() -> None:
    pa = pytest.importorskip("pyarrow")
    memory = Memory(parquet_of(pa.table([[1], [2]], names=["x", "x"])))
    with pytest.raises(DataError, match=r's3://bucket/0, byte 4: row 0 .*"x"'):
        memory.records("parquet")


def test_without_pyarrow_its_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(parquet_of(table_of(3)))
    kind = FORMATS["parquet"]
    table = kind.scan(memory.files, 0, memory.read)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    refused: tuple[Callable[[], Any], ...] = (
        lambda: kind.scan(memory.files, 0, memory.read),
        lambda: kind(memory.files, [table]),
    )
    for call in refused:
        with pytest.raises(UnavailableError, match=r"pip install 'pgasdl\[data\]'"):
            call()
