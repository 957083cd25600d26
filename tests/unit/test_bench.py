"""``pgasdl bench``: its options, its arithmetic, and that each operation ends with valid rows."""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.environment import environment
from support.launcher import PGASDL
from support.requiring import require_modules
from support.starting import finished
from tiers import full

import pgasdl.tools.cli
from pgasdl import models
from pgasdl.errors import ConfigError
from pgasdl.tools.bench.floors import placement
from pgasdl.tools.bench.output import Output, Report, ratio, short
from pgasdl.tools.bench.request import Request
from pgasdl.tools.bench.timing import Samples, durations
from pgasdl.tools.bench.turns import Contender, best_of, usual
from pgasdl.tools.text import parse_size, parse_sizes

KEYS = {"op", "transport", "plan", "ranks", "bytes", "dtype", "us", "floor_us", "placement"}
FAST = ("--repeat", "1", "--seconds", "0.002")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return finished([*PGASDL, "bench", *arguments], env=environment(), timeout=240)


def rows_of(text: str) -> list[dict[str, object]]:
    rows = json.loads(text)
    for row in rows:
        assert row.keys() >= KEYS
        assert row["us"] > 0 and row["floor_us"] > 0
        assert row["min_us"] <= row["us"] <= row["p90_us"]
        assert row["placement"] in ("near", "far", "mixed", "oversubscribed")
    return rows


# --- options


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("1K", 1024), ("4m", 4 << 20), ("16KiB", 16384), ("1G", 1 << 30)]
)
def test_a_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-8", "1.5K", "8 8", "K", "1T", "65G", "٣", "9" * 40])
def test_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="number of bytes"):
        parse_size(text)


def test_sizes_hold_whole_elements() -> None:
    assert parse_sizes("8,1K", 4) == (8, 1024)
    with pytest.raises(ConfigError, match="element"):
        parse_sizes("8,6", 4)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["allreduce", "-n", "0"], "-n 0"),
        (["allreduce", "-n", "17"], "-n 17"),
        (["write_notify", "-n", "1"], "-n 2"),
        pytest.param(
            ["c10d", "--transport", "loopback"],
            "no transport loopback",
            marks=pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
        ),
        (["allreduce", "--sizes", "7"], "size 7"),
        (["allreduce", "--sizes", "many"], "many"),
        (["allreduce", "--repeat", "0"], "--repeat 0"),
        (["allreduce", "--seconds", "nan"], "--seconds"),
        (["model", "--bucket-bytes", "x"], "'x'"),
    ],
)
def test_refused_before_anything_starts(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pgasdl.tools.cli.main(["bench", *arguments]) == pgasdl.tools.cli.USAGE_ERROR
    assert named in capsys.readouterr().err


def test_a_request_reaches_the_ranks_unchanged() -> None:
    request = Request("model", 4, models=("vgg16",), bucket_bytes=25 << 20)
    assert Request.load(request.dump()) == request


# --- arithmetic


def test_a_paced_call_takes_from_the_last_beginning_to_the_last_end() -> None:
    times = durations([100, 5000], [1100, 5040], paced=True, clock_ns=50, fill_ns=0)
    assert times == [0.95, 0.0]


def test_an_oversubscribed_call_is_an_average_without_the_filling() -> None:
    # Four calls, the first from 1000 on, each after 2000 of filling; the last ends at 31000.
    (us,) = durations(
        [1000, 11000, 19000, 27000], [9000, 17000, 25000, 31000],
        paced=False, clock_ns=0, fill_ns=2000,
    )  # fmt: skip
    assert us == pytest.approx((30000 - 3 * 2000) / 4 / 1e3)


def test_samples() -> None:
    samples = Samples([float(value) for value in range(1, 101)])
    assert (samples.median, samples.least, samples.p90) == (50.5, 1.0, 91.0)
    assert Samples([3.0]).p90 == 3.0


@pytest.mark.parametrize(
    ("line", "oversubscribed", "word"),
    [(40, False, "near"), (240, False, "far"), (40, True, "oversubscribed"), (0, False, "alone")],
)
def test_placement(line: float, oversubscribed: bool, word: str) -> None:
    assert placement(line, oversubscribed) == word


def contender(**turns: list[float]) -> Contender:
    made = Contender("", lambda calls: [])
    made.turns = [(where, [us]) for where, times in turns.items() for us in times]
    return made


def test_a_row_keeps_to_the_placement_that_all_share_most() -> None:
    ours = contender(near=[1.0], far=[3.0, 4.0, 5.0], mixed=[9.0] * 4)
    plain = contender(near=[0.5, 0.5], far=[2.0, 2.5], mixed=[7.0])
    other = contender(far=[2.0, 1.5], near=[1.0])
    where = usual([ours, plain, other])
    assert where == "far"
    assert ours.samples(where).median == 4.0
    assert best_of([plain, other, contender(near=[0.1])], where) is other
    assert usual([contender(mixed=[1.0], near=[1.0])]) == "near"
    assert usual([contender(mixed=[1.0]), contender(near=[1.0])]) == "mixed"
    assert len(ours.samples().values) == 8


def test_figures_are_short() -> None:
    assert [short(us) for us in (0.12345, 12.345, 123.45, 12345.6)] == [
        "0.123", "12.35", "123.5", "12346",
    ]  # fmt: skip
    assert ratio(3, 2) == "1.50" and ratio(3, 0) == "-"


def test_a_table_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    table = Report(Output(file=str(file)), {"plan": 6, "us": 5})
    table.begin()
    table.add({"plan": "tree", "us": 0.5}, ("tree", "0.500"))
    table.close()
    assert capsys.readouterr().out == "  plan    us\n  tree 0.500\n"
    assert json.loads(file.read_text()) == [{"plan": "tree", "us": 0.5}]


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [("alexnet", 16, 60_965_224), ("vgg16", 32, 138_357_544), ("resnet50", 161, 25_557_032)],
)
def test_models(name: str, tensors: int, elements: int) -> None:
    assert len(models.layers(name)) == tensors
    assert sum(models.layers(name)) == elements


def test_no_such_model() -> None:
    with pytest.raises(ConfigError, match="alexnet, googlenet, resnet50, vgg16"):
        models.layers("../request")


# --- the ranks


def test_write_notify() -> None:
    done = bench("write_notify", "--sizes", "8,16K,2M", "--json", *FAST)
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    assert [(row["variant"], row["bytes"]) for row in rows] == [
        (variant, nbytes) for nbytes in (8, 16 << 10, 2 << 20) for variant in ("core", "python")
    ]


def test_write_notify_beside_a_socket() -> None:
    done = bench("write_notify", "--transport", "tcp", "--sizes", "8,2M", "--json", *FAST)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["bytes"] for row in rows] == [8, 8, 2 << 20, 2 << 20]
    assert all(row["us"] > 0 and row["floor_us"] > 0 for row in rows)


def test_allreduce() -> None:
    done = bench("allreduce", "--sizes", "8,100K,1M", "--json", *FAST)
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    assert [row["bytes"] for row in rows if row["variant"] == "segment"] == [8, 102400, 1 << 20]
    assert {row["dtype"] for row in rows} == {"float32"}
    assert {row["ranks"] for row in rows} == {2}


@pytest.mark.parametrize("ranks", full(["1", "3"], quick=1))
def test_ranks(ranks: str) -> None:
    done = bench("allreduce", "-n", ranks, "--sizes", "64K", *FAST)
    assert done.returncode == 0, done.stderr
    assert "a cache line takes" in done.stdout
    assert "65536" in done.stdout.splitlines()[-2]


def test_a_plan_that_is_asked_for() -> None:
    done = bench("allreduce", "--plan", "gdraa-direct", "--sizes", "4K", "--json", *FAST)
    assert done.returncode == 0, done.stderr
    assert [row["plan"] for row in rows_of(done.stdout)] == ["gdraa-direct"]
    assert "no row" in done.stderr  # this plan cannot reduce an array outside segments


@pytest.mark.parametrize("buckets", full(["4M", "0"], quick=1))
def test_a_model(buckets: str) -> None:
    done = bench("model", "googlenet", "--bucket-bytes", buckets, "--json", *FAST)
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(done.stdout)
    assert row["bytes"] == 4 * sum(models.layers("googlenet"))
    assert str(row["variant"]).startswith("googlenet")


@pytest.mark.full
def test_loopback() -> None:
    options = ("--transport", "loopback", "--sizes", "4K", "--json")
    done = bench("allreduce", *options, *FAST)
    assert done.returncode == 0, done.stderr
    assert {row["transport"] for row in rows_of(done.stdout)} == {"loopback"}


@pytest.mark.gate
def test_torch_distributed_beside_gloo() -> None:
    require_modules("torch")
    done = bench("c10d", "--sizes", "64,1M", "--json", *FAST)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["op"] for row in rows} >= {"all_reduce", "all_gather", "reduce_scatter", "barrier"}
    assert all(row["us"] > 0 and row["gloo_us"] > 0 for row in rows)
    assert {row["op"] for row in rows if "core_us" in row} == {"all_reduce"}
    done = bench("c10d", "-n", "1", *FAST)
    assert done.returncode == 2 and "between two ranks" in done.stderr
