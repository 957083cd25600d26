"""init, and the end at once: ``hello_goodbye.py HOW``."""

from __future__ import annotations

import sys

from rank_tools import say

import pgasdl

ctx = pgasdl.init()
say("here")
if sys.argv[1] == "with":
    with ctx:
        pass
elif sys.argv[1] == "close":
    ctx.close()
    ctx.close()
elif sys.argv[1] == "again":
    for _ in range(5):
        ctx.close()
        ctx = pgasdl.init()
elif sys.argv[1] == "del":
    del ctx
