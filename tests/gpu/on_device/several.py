"""Collectives of ranks that have a GPU each, by the bits of the host's: for a machine with two.

It decides what cannot be known with one: whether kernels reach a peer's memory (NVLink, PCIe) by
virtual memory and by the older handles, also where each rank sees one GPU only, and in which order
flags and data come there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from on_device import ranks
from on_device.findings import NotAvailable, Tell
from pgasdl.tools import gpus

PROGRAM = Path(__file__).parents[1] / "programs" / "collectives.py"
PARTS = ("allreduces", "handles", "bound", "exchanges")
WAYS = {"abreast": "each rank sees both", "apart": "each rank sees its own"}


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    if len(gpus.survey().gpus) < 2:
        raise NotAvailable("one GPU only")
    parts = PARTS[2:3] if smoke else PARTS
    for way, words in WAYS.items():
        name = f"two GPUs, {words}"
        with tell.step(name):
            command = [sys.executable, "-m", "pgasdl", "run", "-n", "2", str(PROGRAM), f"{way} 0"]
            ranks.finished([*command, *parts], timeout=60)
            tell.check(name, True)
