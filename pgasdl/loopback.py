"""Ranks as threads of one process, with an adversary: a transport for finding bugs.

>>> from pgasdl import loopback
>>> loopback.run(3, lambda ctx: ctx.rank)
[0, 1, 2]
"""

from pgasdl.runtime.threads import run

__all__ = ["run"]
