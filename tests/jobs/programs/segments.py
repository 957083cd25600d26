"""A rank with a segment that its peers map, which then waits as ``held.py`` does."""

import runpy
from pathlib import Path

import pgasdl

with pgasdl.init() as ctx:
    segment = ctx.segment(4096)
    ctx.barrier()
    runpy.run_path(str(Path(__file__).with_name("held.py")))
