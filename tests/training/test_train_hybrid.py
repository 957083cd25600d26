"""The app whose wide layers are spread: it trains as the data-parallel one, and holds less."""

from __future__ import annotations

import re
from pathlib import Path

import jobs
import pytest
from support.places import APPS

pytest.importorskip("torch")


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3])
def test_both_trainings_lose_the_same(size: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "hybrid.png"
    given = ["--network", "tiny", "--iterations", "3", "--picture", str(picture)]
    out = jobs.run(size, APPS / "train_hybrid.py", *given)
    for kind in ("data-parallel", "hybrid"):
        assert f"[0] {kind}, iteration 3 of 3: loss " in out
    (worst,) = re.findall(r"differ by at most (\S+)", out)
    assert float(worst) < 1e-5
    held = dict(re.findall(r"(data-parallel|hybrid) +holds +(\S+) MiB", out))
    assert float(held["hybrid"]) < 0.75 * float(held["data-parallel"])
    assert picture.read_bytes()[:4] == b"\x89PNG"
