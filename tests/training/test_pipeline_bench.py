"""The benchmark of the pipeline by layer: its networks, its rows, its trace, what it refuses."""

from __future__ import annotations

import io
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest
from support.places import APPS
from support.requiring import require_modules
from tiers import full

from pgasdl import loopback, models
from pgasdl.input import Batches

torch = pytest.importorskip("torch")
require_modules("matplotlib")

# Published totals; AlexNet's is that of Caffe, GoogLeNet's without the classifiers on the side.
TOTALS = {
    "alexnet": 60_965_224,
    "vgg16": 138_357_544,
    "googlenet": 6_998_552,
    "resnet50": 25_557_032,
    "gpt2": 124_439_808,
}
BASELINES = ["one-rank", "compute"]


@pytest.fixture(scope="module", autouse=True)
def app() -> Iterator[Any]:
    """The app as a module."""
    sys.path.insert(0, str(APPS))
    import pipeline_bench

    yield pipeline_bench
    sys.path.remove(str(APPS))


# --- the networks


@pytest.mark.parametrize("name", TOTALS)
def test_layers_of_a_network(name: str) -> None:
    from bench.pipeline.networks import NETWORKS
    from bench.pipeline.workload import workload

    work = workload(name, 2, NETWORKS[name].size)
    assert sum(work.counts) == TOTALS[name]
    assert sum(stage.share for stage in work.forward) == pytest.approx(1 / 3)
    assert sum(work.backward) == pytest.approx(2 / 3)
    used = [layer for stage in work.forward for layer in stage.layers]
    assert set(used) == set(range(len(work.counts)))
    if name in models.NAMES:
        # Backward has a module's weight before its bias, or behind it.
        assert sorted(work.counts) == sorted(models.layers(name))
        large = [count for count in work.counts if count > 4096]
        assert large == [count for count in models.layers(name) if count > 4096]


@pytest.mark.parametrize("name", full(["tiny", *TOTALS], quick=1))
def test_a_network_computes(name: str) -> None:
    """The order of its gradients is the one that was found without computing."""
    from bench.pipeline.networks import NETWORKS, data
    from bench.pipeline.workload import workload

    size = max(NETWORKS[name].least, 8)
    network = NETWORKS[name].make()
    arrived: list[str] = []
    for key, parameter in network.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, key=key: arrived.append(key))
    inputs, labels = data(name, 2, size, 0)
    torch.nn.functional.cross_entropy(network(inputs), labels).backward()
    assert tuple(arrived) == workload(name, 2, size).names


# --- the command


def measure(tmp_path: Path, size: int, arguments: str, variants: str) -> dict[str, Any]:
    """Run it, look at what it writes, and return its figures."""
    wanted = [*BASELINES, *variants.split(",")]
    files = {name: tmp_path / name for name in ("figures.json", "trace.json", "picture.png")}
    out = jobs.run(
        size, APPS / "pipeline_bench.py", *arguments.split(), "--variants", variants,
        "--rounds", "1", "--iterations", "1", "--json", str(files["figures.json"]),
        "--trace", str(files["trace.json"]), "--picture", str(files["picture.png"]),
        timeout=240,
    )  # fmt: skip
    assert "no row" not in out and "[0] round      1 of 1\n" in out
    document = json.loads(files["figures.json"].read_text())
    assert document["ranks"] == size
    assert [row["name"] for row in document["variants"]] == wanted
    for row in document["variants"]:
        assert row["iteration"] > 0
        assert len(row["samples"]) == 1
        assert f"\n[0] {row['name']} " in out, "a row of the table"
        if row["name"] not in BASELINES:
            assert row["exchange"] > 0
            assert row["hidden"] is not None
    check_trace(json.loads(files["trace.json"].read_text()), wanted, size)
    assert files["picture.png"].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return document


def check_trace(trace: dict[str, Any], variants: list[str], size: int) -> None:
    """Whether a viewer can lay it out: named rows of spans, in order, that do not overlap."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {
        event["pid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    # One rank alone has a trace of that rank.
    ranks = [(variant, rank) for variant in variants for rank in range(size)]
    ranks.remove(("one-rank", 1))
    used = {event["pid"] for event in events}
    assert {names[process] for process in used} == {f"{v}: rank {r}" for v, r in ranks}
    begins = [event["ts"] for event in events]
    assert begins == sorted(begins)
    assert begins[0] == 0
    threads = {
        (event["pid"], event["tid"])
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    ends: dict[tuple[int, int], float] = defaultdict(float)
    for event in events:
        row = event["pid"], event["tid"]
        assert row in threads
        assert event["dur"] >= 0
        assert event["ts"] >= ends[row] - 0.002, f"{event['name']} overlaps"  # rounded
        ends[row] = event["ts"] + event["dur"]
    tracks = {(names[event["pid"]], event["cat"]) for event in events}
    assert {("compute: rank 0", "forward"), ("compute: rank 1", "backward")} <= tracks
    for rank in range(size):
        assert (f"attach: rank {rank}", "exchange") in tracks


@pytest.mark.full
def test_waits(tmp_path: Path) -> None:
    document = measure(
        tmp_path, 2, "--network tiny --compute-ms 2",
        "attach,attach-thread,attach-phased,caffegpi,sc-b,sc-ob-naive,sc-ob,sc-obr,ddp-gloo,ddp-pgasdl",
    )  # fmt: skip
    assert document["compute_ms"] == 2
    layers = document["variants"][2]["layers"]
    assert [(row["name"], row["bytes"]) for row in layers] == [
        ("conv", 896),
        ("hidden", 33_024),
        ("head", 260_000),
    ]
    for row in layers:
        assert row["forward"] > 0
        assert row["backward"] > 0
        assert row["exchange"] > 0


@pytest.mark.full
def test_training(tmp_path: Path) -> None:
    document = measure(
        tmp_path, 2, "--network tiny --compute real",
        "attach,attach-thread,attach-phased,caffegpi,swcaffe,ddp-gloo,ddp-pgasdl,ddp-hook,gloo-layers,plan-tree",
    )  # fmt: skip
    assert document["compute_ms"] is None
    assert all(row["exchange"] > 0 for row in document["variants"][2]["layers"])


@pytest.mark.full
@pytest.mark.parametrize("compute", ["wait --write", "real"])
def test_mpi(tmp_path: Path, compute: str) -> None:
    pytest.importorskip("mpi4py")
    measure(
        tmp_path, 2, f"--network tiny --scaling strong --compute {compute}",
        "attach,mpi-layers,mpi-fused",
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("arguments", ["--network gpt2 --size 8 --batch 1",
                                       "--network googlenet --size 32 --compute real"])  # fmt: skip
def test_networks(tmp_path: Path, arguments: str) -> None:
    measure(tmp_path, 2, arguments, "attach,attach-phased")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_modules("skimage", "sklearn")
    from bench.pipeline.pictures import written

    folder = tmp_path_factory.mktemp("pictures")
    written(folder, 6, 2)
    return folder


def test_pictures_are_the_size_that_was_asked_for(pictures: Path) -> None:
    from bench.pipeline.pictures import SIZE, decode
    from PIL import Image

    jpeg = (pictures / "jpegs" / "000003.jpg").read_bytes()
    with Image.open(io.BytesIO(jpeg)) as picture:
        assert picture.size == SIZE
    assert decode({"jpg": jpeg, "cls": b"7"}, side=9)["image"].shape == (9, 9, 3)
    assert decode({"jpg": jpeg, "cls": b"7"})["label"] == 7


def test_training_gets_the_pictures_in_order(pictures: Path) -> None:
    """What was decoded while others had their turns is not used, and counts nowhere."""
    from bench.pipeline.fed import _DEPTH, Fed, Pictures
    from bench.pipeline.pictures import decode
    from bench.pipeline.settings import Settings
    from bench.pipeline.training import Training

    settings = Settings("tiny", 2, 16, "real", "weak", seconds=0, write=False, threads=2)
    batches = Batches(6, 2)

    def train(ctx: Any) -> None:
        source = Pictures(ctx, str(pictures / "*.tar"), settings)
        training = Training("tiny", 2, 16, 0)
        fed, taken = Fed(training, source), 0
        for turn in range(2):
            taken += _DEPTH
            for _ in range(3):
                fed.iterate()
                rows = batches.rows(taken).tolist()
                taken += 1
                assert training.labels.tolist() == rows
                for row, image in zip(rows, training.inputs, strict=True):
                    jpeg = (pictures / "jpegs" / f"{row:06}.jpg").read_bytes()
                    square = torch.from_numpy(decode({"jpg": jpeg, "cls": "0"}, side=16)["image"])
                    assert torch.equal(image, square.permute(2, 0, 1) / 255)
            fed.drain()
            assert len(fed.waits) == 2 * (turn + 1)
        training.inputs = torch.empty(0)
        source.close()

    loopback.run(1, train)


@pytest.mark.full
@pytest.mark.parametrize("compute", ["real", "wait --compute-ms 1"])
def test_data(tmp_path: Path, pictures: Path, compute: str) -> None:
    """A row more for each variant, none for one rank alone."""
    file = tmp_path / "figures.json"
    out = jobs.run(
        2, APPS / "pipeline_bench.py", "--network", "tiny", "--compute", *compute.split(),
        "--variants", "attach,ddp-gloo", "--rounds", "1", "--json", str(file),
        "--data", str(pictures / "*.tar"),
    )  # fmt: skip
    document = json.loads(file.read_text())
    fed = ["compute+data", "attach+data", "ddp-gloo+data"]
    assert [share["name"] for share in document["input"]] == fed
    assert [row["name"] for row in document["variants"]][-3:] == fed
    for share in document["input"]:
        assert 0 < share["wait"] < share["iteration"]
        assert share["without"] > 0
        assert f"input      {share['name']}: " in out


@pytest.mark.full
def test_json_alone_on_standard_output() -> None:
    out = jobs.run(2, APPS / "pipeline_bench.py", "--network", "tiny", "--compute-ms", "1",
                   "--rounds", "1", "--variants", "attach", "--json")  # fmt: skip
    document = json.loads("".join(line.removeprefix("[0] ") for line in out.splitlines(True)))
    assert document["network"] == "tiny"


# --- what it refuses


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("--network lenet", "invalid choice"),
        ("--variants attach,magic", "no variant magic"),
        ("--variants sc-b --compute real", "goes with --compute wait"),
        ("--batch 0", "at least 1"),
        ("--rounds 0", "at least 1"),
        ("--iterations -1", "at least 1"),
        ("--layers -1", "at least 0"),
        ("--threads 0", "at least 1"),
        ("--size 8 --network alexnet", "67 to 1024"),
        ("--data folder --network gpt2", "gpt2 reads texts"),
        ("--ratio 0", "above 0"),
        ("--compute-ms nan", "above 0"),
        ("--compute-ms 1 --compute real", "go with --compute wait"),
        ("--write --compute real", "go with --compute wait"),
        ("--trace /nowhere/trace.json", "there is no folder /nowhere"),
    ],
)
def test_refused(app: Any, capsys: pytest.CaptureFixture[str], arguments: str, word: str) -> None:
    with pytest.raises(SystemExit) as ended:
        app.options(arguments.split())
    assert ended.value.code == 2
    assert word in capsys.readouterr().err


def test_all_variants_have_names(app: Any) -> None:
    names = [each.name for each in [*app.BASELINES, *app.VARIANTS]]
    assert len(names) == len(set(names))
    real = {each.name for each in app.options(["--variants", "all", "--compute", "real"]).chosen}
    waits = {each.name for each in app.options(["--variants", "all"]).chosen}
    assert waits - real == {"sc-b", "sc-ob-naive", "sc-ob", "sc-obr"}


# --- figures


def test_shares() -> None:
    from bench.pipeline.cases import Ours
    from bench.pipeline.figures import rows

    def contender(name: str, iterations: list[float], exchanges: list[float]) -> Any:
        made = Ours(None, name, "")  # type: ignore[arg-type]
        made.iteration.turns = [("near", [1e6 * seconds]) for seconds in iterations]
        made.exchanging.turns = [("near", [1e6 * seconds]) for seconds in exchanges]
        return made

    alone = contender("one-rank", [1.0, 2.0, 4.0], [0.0] * 3)
    compute = contender("compute", [1.0, 2.0, 4.0], [0.0] * 3)
    hides = contender("attach", [1.1, 2.2, 4.4], [1.0, 2.0, 4.0])
    ddp = contender("ddp-gloo", [2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    found = {row.name: row for row in rows([alone, compute, hides, ddp], 2, "weak")}
    assert found["compute"].hidden is None
    assert found["attach"].hidden == pytest.approx(0.9)
    assert found["ddp-gloo"].hidden == pytest.approx(0)
    assert found["attach"].relative == pytest.approx(0.55)
    assert found["ddp-gloo"].communication == pytest.approx(0.5)
    assert found["ddp-gloo"].speedup == pytest.approx(1)
    assert found["compute"].efficiency == pytest.approx(1)
    strong = {row.name: row for row in rows([alone, compute, hides, ddp], 2, "strong")}
    assert strong["ddp-gloo"].speedup == pytest.approx(0.5)


def test_a_wrong_mean_gets_no_figures() -> None:
    from bench.pipeline.waiting import NoExchange, WaitingRunner
    from bench.pipeline.workload import workload

    work = workload("tiny", 1, 8)
    exchange = NoExchange(work.counts)
    exchange.result = lambda layer: 0.25  # type: ignore[method-assign]
    runner = WaitingRunner(work, exchange, 1e-3, 0, 2)
    runner.iterate()
    with pytest.raises(SystemExit, match=r"came out as 0\.25"):
        runner.drain()
