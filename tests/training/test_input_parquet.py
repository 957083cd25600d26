"""Rows of Parquet files, beside what pyarrow makes of them; errors of reading in any format."""

from __future__ import annotations

import io
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_tools import Memory, tar_of
from hypothesis import given
from hypothesis import strategies as st

from pgasdl import DataError, PeerLostError, UnavailableError
from pgasdl.input import Loader, Records
from pgasdl.input.formats import FORMATS, parquet


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


def test_some_row_groups_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"number": pa.array(range(12), pa.int64())})
    memory = Memory(parquet_of(table, row_group_size=2))
    one: Any = memory.open("parquet")
    monkeypatch.setattr(parquet, "_KEPT", 4 * one._table(0, memory.read).nbytes)
    opened = memory.open("parquet")

    def read(row: int) -> bool:
        memory.reads.clear()
        assert opened.record(row, memory.read)["number"] == row
        return bool(memory.reads)

    assert [read(row) for row in (0, 1, 2, 4, 6, 1, 7)] == [*(1, 0, 1, 1, 1), 0, 0]
    assert read(8) and not read(0) and read(2)  # the group of row 2 was used the longest ago


def test_a_shuffled_epoch_decodes_each_row_group_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows are mixed within as many row groups as are kept, unless all are."""
    pa = pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_bytes(
        parquet_of(
            pa.table(
                {"number": range(2400), "data": [bytes([k % 251]) * 1000 for k in range(2400)]}
            ),
            row_group_size=100,
            use_dictionary=False,
            compression="none",
        )
    )
    decoded: Counter[int] = Counter()
    decode = parquet.Parquet._decode

    def counted(self: Any, group: int, read: Any) -> Any:
        decoded[group] += 1
        return decode(self, group, read)

    monkeypatch.setattr(parquet.Parquet, "_decode", counted)

    def number(record: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        assert record["data"] == bytes([record["number"] % 251]) * 1000
        return {"number": record["number"]}

    def epoch(**options: Any) -> list[int]:
        decoded.clear()
        with (
            Records(tmp_path / "x.parquet") as records,
            Loader(records, 20, decode=number, workers=2, **options) as loader,
        ):
            found = [number for batch in loader for number in batch["number"].tolist()]
        assert sorted(found) == list(range(2400)) != found
        return found

    def groups(rows: list[int]) -> int:
        return len({row // 100 for row in rows})

    assert groups(epoch()[:240]) == 24 and set(decoded.values()) == {1}
    monkeypatch.setattr(parquet, "_KEPT", 820_000)  # 8 of 24
    found = epoch()
    assert [groups(found[k : k + 300]) for k in range(0, 2400, 300)] == [3] * 8
    assert len(decoded) == 24 and decoded.total() <= 24 + 6
    assert not caplog.records
    epoch(mix=4)
    assert "mix=4: 3 row groups are kept" in caplog.text


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
    memory = Memory(
        tar_of([("a.jpg", b"x" * 60_000)]) if format == "tar" else parquet_of(table_of(10))
    )
    opened = memory.open(format)
    for error in (
        DataError("no such host"),
        PeerLostError("rank 1", 1),
        KeyboardInterrupt("by hand"),
    ):

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
        empty["footer"], empty["decoded"] = np.empty(0, np.uint8), np.empty(0, int)
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
