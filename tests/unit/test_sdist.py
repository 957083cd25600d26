"""The source distribution: made without the repository, and complete.

Lane ``wheels`` compiles it, and runs the wheels in roots without a compiler.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from support.places import ROOT

# What a build reads, and what a user runs first.
FOLDERS = ("native", "pgasdl", "apps", "tests", "docker")
FILES = ("pyproject.toml", "README.md", "LICENSE", ".github/CITATION.cff")
MAKE = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"


def test_a_source_distribution_has_all_sources_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    copy, out = tmp_path / "copy", tmp_path / "out"
    copy.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in (*FOLDERS, *FILES, ".gitignore"):
        source, target = ROOT / name, copy / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copy(source, target)
    for made in ("build/left.o", "pgasdl/_native.so", "train_digits.png"):
        (copy / made).parent.mkdir(exist_ok=True)
        (copy / made).touch()
    command = [sys.executable, "-c", MAKE, str(out)]
    subprocess.run(command, cwd=copy, check=True, capture_output=True, timeout=120)
    (archive,) = out.iterdir()
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    there = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    left_out = {"build/left.o", "pgasdl/_native.so", "train_digits.png"}
    assert names == there - left_out | {"PKG-INFO"}
