"""Peers of ``pgasdl bench`` that need Intel's libraries, which lie in a folder of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.environment import environment
from support.launcher import PGASDL
from support.requiring import lacking
from support.starting import succeeded

# The first installation downloads 460 MB.
pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

PACKAGES = ("oneccl==2022.1.2", "impi-rt==2021.18.1")


@pytest.fixture(scope="session")
def intel() -> Path:
    """A folder with Intel MPI and oneCCL, in the user's cache."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(caches, "pgasdl", "_".join(("intel", *PACKAGES)).replace("==", "-"))
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            subprocess.run([sys.executable, "-m", "venv", draft], check=True)
            pip = [draft / "bin" / "pip", "install", "--quiet", *PACKAGES]
            done = subprocess.run(pip, capture_output=True, text=True, timeout=1000, check=False)
            if done.returncode != 0:
                lacking(f"pip does not install {' '.join(PACKAGES)}: {done.stderr[-300:]}")
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


@pytest.fixture
def roots(intel: Path) -> dict[str, str]:
    return {"I_MPI_ROOT": str(intel), "CCL_ROOT": str(intel)}


@pytest.mark.parametrize("ranks", ["2", "3"])
def test_allreduce(roots: dict[str, str], ranks: str, tmp_path: Path) -> None:
    """Peers check their sums, so these are right, in one piece and in several."""
    file = tmp_path / "rows.json"
    words = ["bench", "allreduce", "-n", ranks, "--sizes", "8,5M", "--peers", "impi,oneccl"]
    words += ["--repeat", "1", "--seconds", "0.002", "--json", str(file)]
    told = succeeded([*PGASDL, *words], env=environment(**roots), timeout=240)
    assert "peer       impi: Intel(R) MPI" in told
    assert "peer       oneccl: oneCCL 2022.1 over Intel(R) MPI" in told
    assert {row["bytes"] for row in json.loads(file.read_text())} == {8, 5 << 20}


def test_write_notify(roots: dict[str, str]) -> None:
    words = ["bench", "write_notify", "--sizes", "8", "--peers", "impi,oneccl", "--repeat", "1"]
    told = succeeded([*PGASDL, *words], env=environment(**roots), timeout=240)
    assert "peer       impi: Intel(R) MPI" in told
    assert "no peer    oneccl: it does not send" in told
