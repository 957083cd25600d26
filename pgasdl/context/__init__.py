"""The context: one rank of a job, and everything a program asks of it.

``memory``, ``collectives``, ``peers`` and ``reports`` have its methods, by subject; ``context``
makes and ends it. The core has the one-sided operations: a program calls them without a detour.
"""

from pgasdl.context.context import Context as Context
from pgasdl.context.context import current as current
from pgasdl.context.context import set_current as set_current
