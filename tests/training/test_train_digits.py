"""The training app: N ranks get one process's weights up to rounding, and all the same bits."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from support.places import APPS
from support.requiring import require_modules
from tiers import full

from pgasdl import Context, loopback

torch = pytest.importorskip("torch")
require_modules("sklearn")

KINDS_OF_PLANS = [
    ("gdraa", "average"),
    ("gdraa", "update"),
    ("gdraa-direct", "average"),
    ("gdraa-direct", "update"),
    ("staged", "average"),
    ("tree", "average"),
    ("tree", "update"),
]
SHORT = "--epochs 1 --batch 120"  # 11 iterations


@pytest.fixture(scope="module", autouse=True)
def app() -> Iterator[Any]:
    """The app as a module; afterwards PyTorch is as it was before."""
    sys.path.insert(0, str(APPS))
    import train_digits

    n_threads = torch.get_num_threads()
    yield train_digits
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(n_threads)
    torch.use_deterministic_algorithms(False)
    sys.path.remove(str(APPS))


def trained(app: Any, size: int, arguments: str) -> list[np.ndarray]:
    """Every rank's weights; the ranks are threads."""
    given = app.options(arguments.split())
    app.prepare(given)

    def program(ctx: Context) -> np.ndarray:
        training = app.train(ctx, given)
        loss = training.course.loss
        assert loss[-3:].mean() < loss[:3].mean() / 1.5
        return np.concatenate(list(app.weights(training.network).values()))

    return loopback.run(size, program)


def assert_same(weights: list[np.ndarray]) -> None:
    for other in weights[1:]:
        assert other.tobytes() == weights[0].tobytes()


@pytest.fixture(scope="module")
def alone(app: Any) -> dict[str, np.ndarray]:
    """One process's weights, in both precisions."""
    return {
        dtype: trained(app, 1, f"{SHORT} --dtype {dtype}")[0] for dtype in ("float32", "float64")
    }


@pytest.mark.parametrize("size", full([2, 3], quick=1))
@pytest.mark.parametrize(("plan", "kind"), full(KINDS_OF_PLANS, quick=2))
def test_weights_of_one_process(
    app: Any, alone: dict[str, np.ndarray], plan: str, kind: str, size: int
) -> None:
    # In double precision, an error that is no rounding stands out.
    weights = trained(app, size, f"{SHORT} --plan {plan} --kind {kind} --dtype float64")
    assert_same(weights)
    np.testing.assert_allclose(weights[0], alone["float64"], rtol=0, atol=1e-12)


@pytest.mark.full
def test_weights_in_single_precision(app: Any) -> None:
    several = "--epochs 3 --batch 120"
    alone = trained(app, 1, several)[0]
    for size, way in ((2, "--plan tree --kind update"), (3, "--plan gdraa")):
        weights = trained(app, size, f"{several} {way}")
        assert_same(weights)
        np.testing.assert_allclose(weights[0], alone, rtol=0, atol=1e-4)


@pytest.mark.full
def test_unequal_shares(app: Any) -> None:
    """100 images for 3 ranks: 33, 33 and 34, all of the same weight."""
    arguments = "--epochs 1 --batch 100 --rate 0.05 --dtype float64"
    weights = trained(app, 3, arguments)
    assert_same(weights)
    np.testing.assert_allclose(weights[0], trained(app, 1, arguments)[0], rtol=0, atol=1e-12)


@pytest.mark.full
def test_another_seed(app: Any, alone: dict[str, np.ndarray]) -> None:
    assert (trained(app, 1, f"{SHORT} --seed 7")[0] != alone["float32"]).mean() > 0.9


@pytest.mark.full
def test_buckets_change_no_bit_and_wire_precision_few(
    app: Any, alone: dict[str, np.ndarray]
) -> None:
    layers = trained(app, 2, f"{SHORT} --plan gdraa")
    buckets = trained(app, 2, f"{SHORT} --plan gdraa --bucket-bytes 100000")
    assert_same([*layers, *buckets])
    rounded = trained(app, 2, f"{SHORT} --wire bfloat16")
    assert_same(rounded)
    difference = np.abs(rounded[0] - alone["float32"])
    assert 1e-6 < difference.max() < 0.1
    assert np.median(difference) < 1e-3


@pytest.mark.full
def test_between_processes_and_from_run_to_run(app: Any) -> None:
    ways = [f"{SHORT} --plan {plan} --kind {kind}" for plan, kind in KINDS_OF_PLANS]
    ways.append(f"{SHORT} --progress thread")
    for size, some in ((2, ways), (3, ways[1::3])):
        out = jobs.run(size, jobs.PROGRAMS / "train_many.py", json.dumps([*some, ways[0]]))
        digests = digests_of_ranks(out, size)
        # Up to three ranks, all plans add in the order of the ranks, and all kinds round alike.
        assert len(set(digests)) == 1
        # Another run, on another transport: threads of this process.
        here = trained(app, size, ways[0])[0]
        assert hashlib.sha256(here.tobytes()).hexdigest() == digests[0]


def digests_of_ranks(out: str, size: int) -> list[str]:
    """Return what all ranks printed, which must be the same."""
    ranks = [json.loads(line.split("] ", 1)[1]) for line in out.splitlines()]
    assert len(ranks) == size
    for rank in ranks[1:]:
        assert rank == ranks[0]
    return ranks[0]


@pytest.mark.gate
def test_the_command(tmp_path: Path) -> None:
    """The README's first command."""
    picture, weights = tmp_path / "digits.png", tmp_path / "weights.npz"
    out = jobs.run(2, APPS / "train_digits.py", "--check-bits", "--picture", str(picture),
                   "--save", str(weights))  # fmt: skip
    assert all(line.startswith("[0] ") for line in out.splitlines()), "only rank 0 prints"
    assert len(re.findall(r"epoch +\d+/10 \[#+\] loss [\d.]+, test [\d.]+%", out)) == 10
    accuracy = re.search(r"accuracy on the test images: ([\d.]+)%", out)
    assert accuracy is not None
    assert float(accuracy[1]) > 97
    assert "the same bits on 2 ranks" in out
    assert re.search(r"time spent waiting: rank 0 [\d.]+%, rank 1 [\d.]+%", out)
    for layer in ("conv1", "conv2", "conv3", "linear1", "linear2"):
        assert re.search(rf"{layer} +[\d,]+( +\d+\.\d+){{6}}", out), f"a row of times for {layer}"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 20_000
    with np.load(weights) as saved:
        assert list(saved) == ["conv1", "conv2", "conv3", "linear1", "linear2"]
        assert all(np.isfinite(saved[name]).all() for name in saved)


@pytest.mark.full
def test_one_process_without_a_launcher(tmp_path: Path) -> None:
    picture = tmp_path / "digits.svg"
    out = jobs.run(0, APPS / "train_digits.py", "--epochs", "2", "--kind", "update",
                   "--plan", "tree", "--picture", str(picture))  # fmt: skip
    assert "1 rank, batches of 64" in out
    assert "\r" not in out
    assert picture.stat().st_size > 20_000
