"""A user's decode function in threads and processes: order, chance, errors, deaths."""

from __future__ import annotations

import copy
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from input_tools import Encoded, decode, decoded, same
from support.leftovers import gone
from support.patience import PATIENCE, until
from support.starting import finished

from pgasdl import ClosedError, DataError
from pgasdl.input.decode import Decoded
from pgasdl.input.workers import SeededOnUse

WAYS = [(0, False), (1, False), (3, False), (2, True)]


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("pgasdl-decode")]


def processes() -> list[Any]:
    return [each for each in multiprocessing.active_children() if each.name == "pgasdl-decode"]


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    assert until(lambda: not threads() and not processes(), 20)


def buffers(source: Decoded, count: int) -> dict[str, np.ndarray]:
    return {
        name: np.full((count, *source.dtype[name].shape), 99, source.dtype[name].base)
        for name in source.dtype.names or ()
    }


def read(source: Decoded, rows: Any, iteration: int = 0) -> dict[str, np.ndarray]:
    out = buffers(source, len(rows))
    source.read(np.array(rows), out, iteration)
    return out


@pytest.mark.parametrize(("workers", "as_processes"), WAYS)
def test_as_a_plain_loop_does(workers: int, as_processes: bool) -> None:
    records = Encoded(50)
    source = Decoded(records, decode, seed=3, workers=workers, processes=as_processes)
    assert source.dtype == np.dtype([("patch", "u1", (3, 4)), ("mean", "f4"), ("label", "i8")])
    assert len(source) == 50
    chance = np.random.default_rng(1)
    for iteration in (0, 1, 7, 1 << 40):
        rows = chance.integers(0, 50, 23)  # some twice
        same(read(source, rows, iteration), decoded(records, rows, iteration, seed=3))
    assert not np.array_equal(read(source, [5], 0)["patch"], read(source, [5], 1)["patch"])
    source.announce(np.array([4, 2]))
    assert records.announced == [[4, 2]]
    source.close()
    source.close()
    with pytest.raises(ClosedError):
        read(source, [1])


def test_in_order_whatever_decodes_faster() -> None:
    """Each of the first records waits for one that stands behind it."""
    done = [threading.Event() for _ in range(12)]

    def waiting(record: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        number = record["number"]
        if started and number < 3:
            assert done[number + 5].wait(20)
        done[number].set()
        return decode(record, random)

    started = False
    records = Encoded(12)
    source = Decoded(records, waiting, workers=4)
    started = True
    same(read(source, range(12)), decoded(records, range(12), 0))
    source.close()


def fails(record: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    if record["number"] in (6, 9):
        raise KeyError("no such label")
    return decode(record, random)


@pytest.mark.parametrize(("workers", "as_processes"), WAYS)
def test_an_error_of_the_function(workers: int, as_processes: bool) -> None:
    records = Encoded(12)
    source = Decoded(records, fails, workers=workers, processes=as_processes)
    where = rf"record 6 \(mem://set, byte {sum(map(len, records.data[:6]))}\): KeyError: 'no such"
    with pytest.raises(DataError, match=where) as caught:
        read(source, range(9))
    assert isinstance(caught.value.__cause__, KeyError)
    if as_processes:
        assert "in fails" in caught.value.__cause__.__notes__[0]  # the worker's traceback
    same(read(source, range(6)), decoded(records, range(6), 0))  # it goes on
    source.close()


class Stubborn(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def fails_oddly(record: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    if record["number"] == 1:
        raise Stubborn(1, 2)  # it can be sent, and not be received
    if record["number"] == 2:
        raise ValueError(threading.Lock())
    return decode(record, random)


def test_an_error_that_cannot_be_sent() -> None:
    source = Decoded(Encoded(3), fails_oddly, processes=True)
    for row, text in ((1, "Stubborn: 1 and 2"), (2, "ValueError: <unlocked")):
        with pytest.raises(DataError, match=rf"record {row} .*: {text}"):
            read(source, [0, row])
    source.close()


def test_nothing_is_written_after_an_error() -> None:
    """The read ends when those decodes do that have begun; few others begin."""
    begun, raised = threading.Event(), threading.Event()
    late: dict[int, bool] = {}

    def slow(record: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        number = record["number"]
        if number == 1:
            assert begun.wait(20)
            raise ValueError("damaged")
        if number > 1:
            begun.set()
            late[number] = raised.wait(0.2)
        return {"x": number}

    source = Decoded(Encoded(50), slow, workers=2)
    out = buffers(source, 50)
    with pytest.raises(DataError, match="record 1 "):
        source.read(np.arange(50), out, 0)
    written = np.flatnonzero(out["x"] != 99).tolist()
    raised.set()
    assert written == sorted([0, *late]) and 2 <= len(written) < 10
    assert not any(late.values())
    source.close()


def changes(record: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    result = {"x": np.zeros((2, 3), np.float32), "y": record["number"]}
    odd: dict[int, dict[str, Any]] = {
        1: {"x": np.zeros((2, 4), np.float32)},
        2: {"x": np.zeros((2, 3))},
        3: {"z": 1},
    }
    return {**result, **odd.get(record["number"], {})} if record["number"] != 4 else {"y": 4}


@pytest.mark.parametrize("as_processes", [False, True])
def test_a_result_unlike_record_0s(as_processes: bool) -> None:
    source = Decoded(Encoded(9), changes, processes=as_processes)
    wanted = r", and of record 0 x is float32 of shape \(2, 3\), y is int64 of shape \(\)"
    for row, text in (
        (1, r"x is float32 of shape \(2, 4\), y is int64"),
        (2, r"x is float64 of shape \(2, 3\)"),
        (3, r"z is int64"),
        (4, r"y is int64 of shape \(\)"),
    ):
        with pytest.raises(DataError, match=rf"record {row} \(mem:.*{text}.*{wanted}"):
            read(source, [0, row])
    source.close()


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ([1, 2], "wanted a dict of arrays"),
        ({}, "wanted a dict of arrays"),
        ({"x": np.zeros((0, 3))}, r"'x': float64 of shape \(0, 3\)"),
        ({"x": object()}, "'x': object"),
        ({"x": [[1], [2, 3]]}, "ValueError"),
    ],
)
def test_results_that_are_no_arrays(result: Any, text: str) -> None:
    with pytest.raises(DataError, match=rf"record 0 \(mem://set, byte 0\): .*{text}"):
        Decoded(Encoded(3), lambda record, random: result)


@pytest.mark.parametrize(("workers", "as_processes"), [(-1, False), (0, True), (-1, True)])
def test_workers_that_are_refused(workers: int, as_processes: bool) -> None:
    with pytest.raises(ValueError, match=f"{workers} workers"):
        Decoded(Encoded(3), decode, workers=workers, processes=as_processes)


def test_a_function_that_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="a function that a module defines, or use threads"):
        Decoded(Encoded(3), lambda record, random: {"x": 1}, processes=True)


class Mortal:
    """Decodes; for some records it kills its own process, as often as a file has bytes."""

    def __init__(self, file: Path, numbers: tuple[int, ...]) -> None:
        self.file, self.numbers = file, numbers

    def __call__(self, record: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        if record["number"] in self.numbers:
            left = self.file.stat().st_size
            if left:
                os.truncate(self.file, left - 1)
                os.kill(os.getpid(), signal.SIGKILL)
        return decode(record, random)


def test_a_worker_that_dies_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "lives"
    file.write_bytes(b"1")
    records = Encoded(20)
    source = Decoded(records, Mortal(file, (7,)), workers=2, processes=True)
    with caplog.at_level(logging.WARNING, "pgasdl"):
        same(read(source, range(20), 5), decoded(records, range(20), 5))
    [line] = caplog.messages
    assert line.startswith("record 7 (mem://set, byte ") and "died (signal 9)" in line
    assert len(processes()) == 2
    file.write_bytes(b"12")
    where = r"record 7 \(mem://set, byte \d+\): its worker died \(signal 9\), the second time"
    with pytest.raises(DataError, match=where):
        read(source, range(20), 6)
    same(read(source, range(20), 7), decoded(records, range(20), 7))
    source.close()


def test_an_idle_worker_that_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    records = Encoded(20)
    source = Decoded(records, decode, processes=True)
    [process] = processes()
    os.kill(process.pid, signal.SIGKILL)
    with caplog.at_level(logging.WARNING, "pgasdl"):
        same(read(source, range(20)), decoded(records, range(20), 0))
    assert len(caplog.messages) == 1
    source.close()


def test_a_forked_process_does_not_end_its_parents_workers() -> None:
    records = Encoded(9)
    source = Decoded(records, decode, processes=True)
    pids = {process.pid for process in processes()}
    child = os.fork()
    if not child:
        source.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert {process.pid for process in processes()} == pids
    same(read(source, range(9)), decoded(records, range(9), 0))
    source.close()


class Hangs:
    """Decodes record 0; for the others it adds a byte to a file, and never returns."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, record: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        if record["number"]:
            with self.file.open("ab") as file:
                file.write(b"1")
            signal.pause()
        return {"x": 1}

    def times(self) -> int:
        return self.file.stat().st_size if self.file.exists() else 0


def test_close_ends_workers_that_hang(tmp_path: Path) -> None:
    hangs = Hangs(tmp_path / "begun")
    source = Decoded(Encoded(9), hangs, processes=True)
    met: list[BaseException] = []

    def reading() -> None:
        try:
            read(source, range(9))
        except ClosedError as error:
            met.append(error)

    reader = threading.Thread(target=reading)
    reader.start()
    assert until(lambda: hangs.times() == 1)
    source.close()
    reader.join(20)
    assert met and not processes()


@pytest.mark.parametrize("as_processes", [False, True])
def test_it_ends_when_nobody_has_it(as_processes: bool) -> None:
    source = Decoded(Encoded(9), decode, workers=2, processes=as_processes)
    read(source, range(9))
    assert threads()
    pids = [process.pid for process in processes()]
    assert len(pids) == 2 * as_processes
    del source
    gc.collect()
    assert until(lambda: not threads()) and gone(pids)


PROGRAM = """
import sys
from pathlib import Path
from input_tools import Encoded
from test_input_decode import Hangs, processes, read
from pgasdl.input.decode import Decoded
from pgasdl.input.workers import SeededOnUse

if __name__ == "__main__":
    source = Decoded(Encoded(9), Hangs(Path(sys.argv[1])), workers=2, processes=True)
    print(*[process.pid for process in processes()], flush=True)
    read(source, range(2))
"""


HANGS_IN_A_THREAD = """
import sys
from pathlib import Path
from input_tools import Encoded
from test_input_decode import Hangs
from pgasdl import PgasTimeoutError
from pgasdl.input import Loader

if __name__ == "__main__":
    loader = Loader(
        Encoded(9), 3, decode=Hangs(Path(sys.argv[1])), workers=2, timeout=0.1,
        processes=sys.argv[2] == "1",
    )
    try:
        next(iter(loader))
    except PgasTimeoutError:
        print("late", flush=True)
"""


@pytest.mark.parametrize("as_processes", [False, True])
def test_a_decode_that_hangs_does_not_keep_the_process(tmp_path: Path, as_processes: bool) -> None:
    program = tmp_path / "program.py"
    program.write_text(HANGS_IN_A_THREAD)
    line = [sys.executable, str(program), str(tmp_path / "begun"), str(int(as_processes))]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = finished(line, env={**os.environ, **path}, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "late\n"), done.stderr


def test_kill_9_of_the_parent_leaves_nothing(tmp_path: Path) -> None:
    """Neither the worker that waits for a record nor the one that never comes back from one."""
    program, hangs = tmp_path / "program.py", Hangs(tmp_path / "begun")
    program.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, str(program), str(hangs.file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert until(lambda: hangs.times() == 1)
        parent.kill()
    assert gone(pids)


def test_the_generator_of_a_record_is_made_when_it_is_used() -> None:
    key = 3, 4, 5
    unused = SeededOnUse(key)
    assert isinstance(unused, np.random.Generator)
    assert "_key" in object.__getattribute__(unused, "__dict__")
    ways: list[Callable[[Any], Any]] = [
        lambda random: random,
        lambda random: pickle.loads(pickle.dumps(random)),
        copy.deepcopy,
        np.random.default_rng,
        lambda random: random.spawn(2)[1],
        lambda random: np.random.Generator(random.bit_generator),
    ]
    for way in ways:
        plain = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
        ours, wanted = way(SeededOnUse(key)), way(plain)
        assert ours.random() == wanted.random()
        assert ours.integers(9, size=20).tolist() == wanted.integers(9, size=20).tolist()
    assert "PCG64" in repr(SeededOnUse(key))
