"""Runs a program that is reached by way of a proxy: ``slow.py PORT PROGRAM ARGUMENTS...``."""

import runpy
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
from support.tcp_proxy import through

with through(int(sys.argv[1])):
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
