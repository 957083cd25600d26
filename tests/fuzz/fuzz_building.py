"""Builds the native targets: with clang for libFuzzer, with g++ to replay their corpus.

``python tests/fuzz/fuzz_building.py`` builds them with clang and prints their folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))
from building import FLAGS, ROOT, run, tool

HERE = Path(__file__).parent


def missing_tools(compiler: str) -> list[str]:
    """The tools that a build needs and this machine lacks."""
    return [name for name in ("cmake", "ninja", compiler) if tool(name) is None]


def build(compiler: str) -> Path:
    """The folder of the programs, kept between runs under ``build/``."""
    folder = ROOT / "build" / f"fuzz-{compiler}"
    cmake, ninja = tool("cmake"), tool("ninja")
    assert cmake is not None and ninja is not None
    run(
        cmake, "-S", str(HERE), "-B", str(folder), "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DCMAKE_CXX_COMPILER={compiler}",
        "-DCMAKE_BUILD_TYPE=Checked", f"-DCMAKE_CXX_FLAGS_CHECKED={FLAGS}",
    )  # fmt: skip
    run(cmake, "--build", str(folder))
    return folder


if __name__ == "__main__":
    print(build("clang++"))
