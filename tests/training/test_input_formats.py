"""Addresses in files, names of formats, and folders of pictures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from format_tools import Memory
from hypothesis import given
from hypothesis import strategies as st

from pgasdl import DataError
from pgasdl.input import Records
from pgasdl.input.files import File, Files
from pgasdl.input.formats import format_of


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

    def served(query: str, version: str) -> str:
        return Files([File(f"http://host/a?{query}", 1, version)]).digest

    assert served("sig=1", '"tag"') == served("sig=2", '"tag"') != served("sig=2", '"other"')
    assert served("id=1", "Sun, 29 Nov 2026") != served("id=2", "Sun, 29 Nov 2026")
    Files([File(os.fsdecode(b"caf\xe9"), 1)]).digest  # noqa: B018


def test_names_say_the_format() -> None:
    def named(*names: str) -> str:
        return format_of(Files([File(name, 1) for name in names]))

    assert named("a/0.tar", "s3://b/1.TAR") == named("x.tar.gz") == "tar"
    assert named("https://host/0.parquet", "https://host/1.parquet?sig=a/b.c") == "parquet"
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


def test_folders_that_are_named_have_the_same_classes(tmp_path: Path) -> None:
    """The names of those in them count, and not on which disk they lie."""
    for name in ("disk0/cat/1.png", "disk0/dog/2.png", "disk1/cat/3.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    for folders, wanted in (
        (["disk0", "disk1"], [("cat/1", 0), ("dog/2", 1), ("cat/3", 0)]),
        (["disk0/dog", "disk1/cat"], [("disk0/dog/2", 0), ("disk1/cat/3", 1)]),
        (["disk1", "disk0/dog"], [("disk1/cat/3", 1), ("disk0/dog/2", 0)]),
    ):
        with Records([tmp_path / folder for folder in folders]) as records:
            assert [(each["__key__"], each["cls"]) for each in records] == wanted
    (tmp_path / "disk0/dog/2.CLS").write_bytes(b"7")
    with pytest.raises(DataError, match=r"dog/2\.CLS: .*number as cls"):
        Records(tmp_path / "disk0", format="folder")


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
        (["http://h/%C3%A9l/x%20y.png", "http://h/c/z.png?n=1"], ["él/x y", "c/z"], [1, 0]),
    ],
)
def test_the_root_is_the_deepest_folder_of_all(
    urls: list[str], keys: list[str], labels: list[int | None]
) -> None:
    records = Memory(*(b"x" for _ in urls), urls=urls).records("folder")
    assert [record["__key__"] for record in records] == keys
    assert [record.get("cls") for record in records] == labels
