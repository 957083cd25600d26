"""Builds the package with a sanitizer, in a separate folder; says what Python needs to run it.

The interpreter is not instrumented: the sanitizer's library is loaded before it.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_OPTIONS = {
    # The interpreter leaks on purpose.
    "address": {
        "ASAN_OPTIONS": "detect_leaks=0:strict_string_checks=1:exitcode=66",
        "PYTHONMALLOC": "malloc",
    },
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:exitcode=66"},
}
KINDS = tuple(_OPTIONS)
# The second library, so that the first finds the C++ exception functions that it intercepts.
_LIBRARIES = {
    "address": ("libasan.so", "libstdc++.so.6"),
    "thread": ("libtsan.so", "libstdc++.so.6"),
}


@cache
def folder(kind: str) -> Path:
    """Build what has changed; return the folder of the package."""
    target = ROOT / "build" / f"python-{kind}"
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "-q", "--no-deps",
            "--upgrade", "--target", str(target), "-C", f"build-dir={ROOT / 'build' / kind}",
            "-C", f"cmake.define.PGASDL_SANITIZE={kind}", "-C", "cmake.build-type=Checked",
            "-C", "cmake.define.CMAKE_CXX_FLAGS_CHECKED=-O1 -g", str(ROOT),
        ],
        check=True, timeout=3600,
    )  # fmt: skip
    return target


def environment(kind: str) -> dict[str, str]:
    """Variables for an interpreter that imports the package from that folder."""
    libraries = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"],
            check=True, capture_output=True, text=True, timeout=60,
        ).stdout.strip()
        for name in _LIBRARIES[kind]
    ]  # fmt: skip
    preload = " ".join(libraries)
    return {"PYTHONPATH": str(folder(kind)), "LD_PRELOAD": preload, **_OPTIONS[kind]}
