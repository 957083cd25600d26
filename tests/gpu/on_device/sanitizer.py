"""compute-sanitizer's memcheck on the kernels, and on collectives of ranks that are threads."""

from __future__ import annotations

import re
import shutil
import sys

from on_device import PROGRAMS, ranks
from on_device.findings import NotAvailable, Tell
from on_device.kernels import NATIVE_TEST, build

TOOL = "compute-sanitizer"


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    if shutil.which(TOOL) is None:
        raise NotAvailable(f"no {TOOL} here")
    collectives = [sys.executable, str(PROGRAMS / "collectives.py"), "2", "allreduces"]
    with tell.step("memcheck of collectives"):
        checked(tell, "memcheck of collectives", collectives, 40)
    with tell.step("memcheck of test_device_reduce"):
        if not NATIVE_TEST.exists():
            build()
        checked(tell, "memcheck of test_device_reduce", [str(NATIVE_TEST)], 60)


def checked(tell: Tell, name: str, command: list[str], seconds: float) -> None:
    """Tell what the tool says at its end."""
    flags = ["--tool", "memcheck", "--target-processes", "all"]
    output = ranks.finished([TOOL, *flags, *command], timeout=seconds, fails=True)
    found = re.findall(r"ERROR SUMMARY: (\d+) errors?", output)
    held = bool(found) and not any(map(int, found))
    tell.check(name, held, error="" if held else output[-2500:])
