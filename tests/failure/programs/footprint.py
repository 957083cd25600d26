"""How much memory a rank has beyond an interpreter with NumPy."""

from __future__ import annotations

import sys

import numpy as np


def resident_kib() -> int:
    """Pages that this process has for itself or shares through mappings, code included."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


before = resident_kib()

from rank_tools import say  # noqa: E402 - after the first look

import pgasdl  # noqa: E402

with pgasdl.init() as ctx:
    segment = ctx.segment(1 << 20)
    segment.numpy()[:] = 1
    array = np.ones(1 << 18, np.float32)
    for count in (10, 1000, 1 << 16):
        for plan in ("gdraa", "tree", "staged"):
            ctx.allreduce(array[:count], op="mean", plan=plan)
    ctx.allreduce(segment.numpy(np.float32), op="mean")
    say("grown", kib=resident_kib() - before, torch="torch" in sys.modules)
    ctx.barrier()
