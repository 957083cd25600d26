"""One-sided PGAS communication for deep learning.

>>> import pgasdl
>>> with pgasdl.init() as ctx:            # started by: pgasdl run -n 2 program.py
...     segment = ctx.segment(4096)
...     if ctx.rank == 0:
...         ctx.write_notify(segment[0:8], 1, segment[0:8], notification=0)
...     elif ctx.notify_waitsome(segment) == 0:
...         ctx.notify_reset(segment, 0)

Importing this package loads nothing else: what is used is loaded on first use, so that
``pgasdl doctor`` can tell what is wrong where NumPy or the native core cannot be loaded.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgasdl.context import Context as Context
    from pgasdl.context import Limits as Limits
    from pgasdl.errors import AlignmentError as AlignmentError
    from pgasdl.errors import BootstrapError as BootstrapError
    from pgasdl.errors import BufferRefused as BufferRefused
    from pgasdl.errors import ClosedError as ClosedError
    from pgasdl.errors import ConfigError as ConfigError
    from pgasdl.errors import MismatchError as MismatchError
    from pgasdl.errors import NotificationError as NotificationError
    from pgasdl.errors import PeerLost as PeerLost
    from pgasdl.errors import PgasError as PgasError
    from pgasdl.errors import PlanError as PlanError
    from pgasdl.errors import QueueError as QueueError
    from pgasdl.errors import QueueFull as QueueFull
    from pgasdl.errors import RankError as RankError
    from pgasdl.errors import SegmentError as SegmentError
    from pgasdl.errors import Timeout as Timeout
    from pgasdl.errors import UnavailableError as UnavailableError
    from pgasdl.exchange import Block as Block
    from pgasdl.exchange import GradientExchange as GradientExchange
    from pgasdl.group import Group as Group
    from pgasdl.handle import Collective as Collective
    from pgasdl.segment import Segment as Segment
    from pgasdl.startup import init as init

__version__ = "0.1.0"

_HOMES = {
    "context": ["Context", "Limits"],
    "errors": [
        "AlignmentError",
        "BootstrapError",
        "BufferRefused",
        "ClosedError",
        "ConfigError",
        "MismatchError",
        "NotificationError",
        "PeerLost",
        "PgasError",
        "PlanError",
        "QueueError",
        "QueueFull",
        "RankError",
        "SegmentError",
        "Timeout",
        "UnavailableError",
    ],
    "exchange": ["Block", "GradientExchange"],
    "group": ["Group"],
    "handle": ["Collective"],
    "segment": ["Segment"],
    "startup": ["init"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'pgasdl' has no attribute {name!r}")
    try:
        value = getattr(import_module(f"pgasdl.{module}"), name)
    except ImportError as error:
        if find_spec("pgasdl._native") is None:
            raise ImportError(
                f"{__path__[0]} has no compiled part (pgasdl._native). It is the source folder, "
                "found before the installed package: work in another folder, or install with "
                "pip install -e ."
            ) from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
