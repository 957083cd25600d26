"""The version stands in pyproject.toml, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest
from support.places import ROOT

import pgasdl

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


def test_the_changelog_begins_with_it() -> None:
    lines = (ROOT / ".github" / "CHANGELOG.md").read_text().splitlines()
    newest = next(line for line in lines if line.startswith("## "))
    assert newest.split()[1].strip("[]") in {VERSION, "Unreleased"}
