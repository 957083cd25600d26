"""The machine: its description in reports, and a processor for each rank."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe() -> str:
    """Describe processor, number of cores, caches, kernel and Python in one line."""
    parts = [_processor(), f"{len(os.sched_getaffinity(0))} cores"]
    parts += _caches()
    parts.append(f"Linux {platform.release()}")
    parts.append(f"Python {platform.python_version()}")
    return ", ".join(parts)


def pin(rank: int, size: int) -> None:
    """Bind the calling thread to a processor of its own, if there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    if size <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def _processor() -> str:
    family: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                key, _, value = line.partition(":")
                family.setdefault(key.strip(), value.strip())
    except OSError:
        return platform.machine()
    name = family.get("model name", platform.machine())
    model = family.get("cpu family"), family.get("model")
    return f"{name} (family {model[0]}, model {model[1]})" if all(model) else name


def _caches() -> list[str]:
    found = []
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = (
                (folder / name).read_text(encoding="ascii").strip()
                for name in ("level", "type", "size")
            )
        except OSError:
            continue
        if kind == "Unified":
            found.append(f"L{level} {size}")
    return found
