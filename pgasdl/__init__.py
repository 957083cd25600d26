"""One-sided PGAS communication for deep learning.

>>> import pgasdl
>>> with pgasdl.init() as ctx:            # started by: pgasdl run -n 2 program.py
...     segment = ctx.segment(4096)
...     if ctx.rank == 0:
...         ctx.write_notify(segment[0:8], 1, segment[0:8], notification=0)
...     elif ctx.notify_waitsome(segment) == 0:
...         ctx.notify_reset(segment, 0)
"""

from pgasdl.allreduce import Allreduce
from pgasdl.context import Context, Limits, init
from pgasdl.errors import (
    AlignmentError,
    BootstrapError,
    BufferRefused,
    ClosedError,
    ConfigError,
    MismatchError,
    NotificationError,
    PeerLost,
    PgasError,
    PlanError,
    QueueError,
    QueueFull,
    RankError,
    SegmentError,
    Timeout,
    UnavailableError,
)
from pgasdl.exchange import GradientExchange
from pgasdl.group import Group
from pgasdl.segment import Segment

__version__ = "0.1.0"

__all__ = [
    "AlignmentError",
    "Allreduce",
    "BootstrapError",
    "BufferRefused",
    "ClosedError",
    "ConfigError",
    "Context",
    "GradientExchange",
    "Group",
    "Limits",
    "MismatchError",
    "NotificationError",
    "PeerLost",
    "PgasError",
    "PlanError",
    "QueueError",
    "QueueFull",
    "RankError",
    "Segment",
    "SegmentError",
    "Timeout",
    "UnavailableError",
    "init",
]
