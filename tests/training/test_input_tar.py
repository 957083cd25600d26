"""Tars by webdataset's convention, beside what webdataset makes of them."""

from __future__ import annotations

import gc
import gzip
import io
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from format_tools import Member, Memory, tar_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pgasdl import DataError, _native
from pgasdl.input.formats import FORMATS

FORMATS_OF_TARS = {
    "ustar": tarfile.USTAR_FORMAT,
    "gnu": tarfile.GNU_FORMAT,
    "pax": tarfile.PAX_FORMAT,
}


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


class AllOthers(_native.TarSamples):
    """Plain members are left to tarfile, too."""

    def walk(self, data: Any, begin: int) -> str:
        return "other"


def table_of(data: bytes) -> dict[str, bytes] | str:
    memory = Memory(data)
    try:
        table = FORMATS["tar"].scan(memory.files, 0, memory.read)
    except DataError as error:
        return str(error)
    return {name: column.tobytes() for name, column in table.items()}


@given(
    st.lists(st.tuples(NAMES, SIZES, st.booleans(), st.booleans()), max_size=9),
    st.sampled_from(sorted(FORMATS_OF_TARS)),
    st.none() | st.floats(0, 1),
)
def test_the_core_takes_members_as_tarfile_does(
    members: list[tuple[str, int, bool, bool]], format: str, cut: float | None
) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=FORMATS_OF_TARS[format]) as tar:
        for name, size, fraction, linked in members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = size, 1.5 if fraction else 1
            if linked:
                info.type, info.linkname, info.size = tarfile.LNKTYPE, "a.jpg", 0
            with suppress(ValueError):  # ustar has no place for a name
                tar.addfile(info, io.BytesIO(bytes(size)))
    data = out.getvalue()
    data = data if cut is None else data[: int(cut * len(data))]
    found = table_of(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "TarSamples", AllOthers)
        assert table_of(data) == found


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
    assert sum(nbytes for _, nbytes in memory.reads) <= (len(members) + 1) * 4096
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


def test_numbers_that_are_not_used_may_be_odd_in_any_plain_header() -> None:
    for name in ("b.jpg", "é.jpg"):
        data = bytearray(tar_of([("a.jpg", b"x"), (name, b"y")]))
        header = data[1024:1536]
        header[100:108] = b"a mode.\0"
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        data[1024:1536] = header
        wanted = [{"__key__": "a", "jpg": b"x"}, {"__key__": name[0], "jpg": b"y"}]
        assert Memory(bytes(data)).records("tar") == wanted


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
