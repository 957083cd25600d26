"""The flight record names operations; it is dumped on SIGUSR1, on a timeout and on a loss."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from failure_harness import launched
from support.forking import Job
from support.patience import until
from support.requiring import lacking

from pgasdl.runtime import flight_record

OPERATIONS = ["write peer", "read peer", "write_notify peer", "notify peer", "notify_add peer",
              "write_notify_add peer", "wait_count", "wait ", "waitsome",
              "atomic peer", "passive_send peer", "passive_receive peer", "allgather", "plan_start",
              "plan_done", "barrier"]  # fmt: skip


def check(text: str, rank: int, segment: int) -> None:
    assert f"pgasdl rank {rank}: last" in text
    for operation in OPERATIONS:
        assert re.search(rf"^ +-[\d.]+ u?s +{re.escape(operation)}", text, re.M), (operation, text)
    right = 1 - rank
    pattern = rf"write_notify peer {right} segment {segment} id 41 bytes 77"
    assert re.search(pattern, text), text
    ages = [float(age) for age in re.findall(r"^ +-([\d.]+) us", text, re.M)]
    assert ages == sorted(ages, reverse=True) and ages[0] < 60e6


def test_signal_dumps_to_standard_error(job: Callable[..., Job]) -> None:
    ranks = job("records.py", 2, "signal", PGASDL_TIMEOUT="20")
    ranks.said("running")
    for rank in (0, 1):
        ranks.signal(rank, signal.SIGUSR1)
        said = ranks[rank].text
        ranks.until(lambda said=said: any("barrier" in line for line in said), "dump", 5)
        text = "\n".join(ranks[rank].text)
        assert "flight record, on SIGUSR1" in text
        check(text, rank, ranks.event(rank, "running")["segment"])
        assert ranks[rank].status is None  # it goes on


@pytest.mark.parametrize("how", ["timeout", "lost"])
def test_error_that_leaves_the_context_dumps(
    job: Callable[..., Job], how: str, tmp_path: Path
) -> None:
    ranks = job("records.py", 2, how, PGASDL_TIMEOUT="20", PGASDL_TRACE=str(tmp_path))
    ranks.said("running")
    if how == "lost":
        ranks.signal(1, signal.SIGKILL)
    status = ranks.ended([0])
    assert status == [1], ranks.transcript()
    files = sorted(tmp_path.iterdir())
    assert any("rank-0" in file.name for file in files), files
    text = next(file for file in files if "rank-0" in file.name).read_text()
    error = "PgasTimeoutError" if how == "timeout" else "PeerLostError"
    assert f"flight record, after {error}" in text or "flight record, after PeerLostError" in text
    check(text, 0, ranks.event(0, "running")["segment"])


def test_error_that_was_handled_dumps_nothing(job: Callable[..., Job], tmp_path: Path) -> None:
    ranks = job("records.py", 2, "caught", PGASDL_TIMEOUT="20", PGASDL_TRACE=str(tmp_path))
    assert ranks.ended() == [0, 0], ranks.transcript()
    assert list(tmp_path.iterdir()) == []


def test_trace_directory_that_cannot_be_written(job: Callable[..., Job], tmp_path: Path) -> None:
    """Then the record goes to standard error, and the error that led to it is not replaced."""
    missing = tmp_path / "missing"
    ranks = job("records.py", 2, "timeout", PGASDL_TIMEOUT="20", PGASDL_TRACE=str(missing))
    assert ranks.ended() == [1, 1], ranks.transcript()
    for rank in (0, 1):
        text = "\n".join(ranks[rank].text)
        assert re.search(r"^pgasdl\.errors\.(PgasTimeoutError|PeerLostError): ", text, re.M), text
        assert "flight record, after" in text


def test_launcher_passes_the_signal_on(tmp_path: Path) -> None:
    program = (
        "import pgasdl\n"
        "with pgasdl.init() as ctx:\n"
        "    segment = ctx.segment(64)\n"
        "    print('ready', flush=True)\n"
        "    ctx.notify_waitsome(segment)\n"
    )
    with launched("-n", "2", "-c", program, PGASDL_TRACE=str(tmp_path)) as process:
        assert process.stdout is not None
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]

        def both_wait() -> bool:
            process.send_signal(signal.SIGUSR1)
            waits = (
                r"^rank . waits in notify_waitsome on notifications \[0, 65536\) .* for [\d.]+ s"
            )
            texts = [file.read_text() for file in tmp_path.iterdir()]
            return len(texts) == 2 and all(re.search(waits, text, re.M) for text in texts)

        assert until(both_wait, 5)
        assert process.poll() is None


@pytest.mark.parametrize("what", ["fifo", "link", "hard link", "other user"])
def test_what_a_stranger_put_under_the_name_of_a_record_stays(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place, other = tmp_path / "record", tmp_path / "other"
    other.write_text("theirs")
    if what == "fifo":
        os.mkfifo(place)
    elif what == "link":
        place.symlink_to(other)
    elif what == "hard link":
        place.hardlink_to(other)
    elif os.geteuid() == 0:
        place.write_text("theirs")
        os.chown(place, 65534, 65534)
    else:
        lacking("only root can give a file away")
    flight_record.dump("operations", "on SIGUSR1", str(tmp_path), "record")
    text = capsys.readouterr().err
    assert f"{place} cannot be written" in text and text.endswith("on SIGUSR1\noperations")
    assert other.read_text() == "theirs" and (what == "fifo" or place.read_text() == "theirs")


def test_a_record_goes_to_a_file_and_a_line_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    flight_record.dump("operations\n", "on SIGUSR1", None, "record")
    assert capsys.readouterr().err == "flight record, on SIGUSR1\noperations\n"
    for folder, to_file in ((None, True), (str(tmp_path), True), (str(tmp_path), False)):
        flight_record.dump("operations\n", "after timeout", folder, "record", to_file=to_file)
        assert capsys.readouterr().err == f"flight record: {tmp_path}/record\n"
        assert (tmp_path / "record").read_text() == "flight record, after timeout\noperations\n"
        (tmp_path / "record").unlink()
