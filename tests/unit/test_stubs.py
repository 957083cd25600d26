"""The checked-in stub matches the native module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.places import ROOT

import pgasdl

STUB = ROOT / "pgasdl" / "_native.pyi"


def meaning(text: str) -> list[str]:
    """Lines without their outer space: how a generator indents does not matter."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_the_stub_is_fresh(tmp_path: Path) -> None:
    pytest.importorskip("nanobind")
    generated = tmp_path / "_native.pyi"
    patterns = ROOT / "native" / "python" / "stubs.pat"
    command = [
        sys.executable, "-m", "nanobind.stubgen", "-q", "-P", "-m", "pgasdl._native",
        "-p", str(patterns), "-o", str(generated),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=120, cwd=tmp_path)
    assert meaning(generated.read_text()) == meaning(STUB.read_text()), (
        "pgasdl/_native.pyi is stale; after building: python -m nanobind.stubgen -q -P "
        "-m pgasdl._native -p native/python/stubs.pat -o pgasdl/_native.pyi"
    )


def test_types_are_shipped() -> None:
    installed = Path(pgasdl.__file__).parent
    assert (installed / "py.typed").exists()
    assert meaning((installed / "_native.pyi").read_text()) == meaning(STUB.read_text())
