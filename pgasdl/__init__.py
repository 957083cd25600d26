"""One-sided PGAS communication for deep learning.

>>> import pgasdl
>>> with pgasdl.init() as ctx:            # started by: pgasdl run -n 2 program.py
...     segment = ctx.segment(4096)
...     if ctx.rank == 0:
...         ctx.write_notify(segment[0:8], 1, segment[0:8], notification=0)
...     elif ctx.notify_waitsome(segment) == 0:
...         ctx.notify_reset(segment, 0)

Importing this package loads nothing else. Each name is loaded on first use, so ``pgasdl doctor``
works, and says what is wrong, where NumPy or the native core cannot be loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    __version__: str
    from pgasdl.collectives.handle import Collective as Collective
    from pgasdl.config import Limits as Limits
    from pgasdl.context import Context as Context
    from pgasdl.counters import Counters as Counters
    from pgasdl.counters import LayerTimes as LayerTimes
    from pgasdl.counters import Traffic as Traffic
    from pgasdl.counters import Waits as Waits
    from pgasdl.errors import AlignmentError as AlignmentError
    from pgasdl.errors import BootstrapError as BootstrapError
    from pgasdl.errors import BufferRefusedError as BufferRefusedError
    from pgasdl.errors import CheckpointError as CheckpointError
    from pgasdl.errors import ClosedError as ClosedError
    from pgasdl.errors import ConfigError as ConfigError
    from pgasdl.errors import DataError as DataError
    from pgasdl.errors import JobError as JobError
    from pgasdl.errors import LayoutError as LayoutError
    from pgasdl.errors import MismatchError as MismatchError
    from pgasdl.errors import NotificationError as NotificationError
    from pgasdl.errors import PeerLostError as PeerLostError
    from pgasdl.errors import PgasError as PgasError
    from pgasdl.errors import PgasTimeoutError as PgasTimeoutError
    from pgasdl.errors import PlanError as PlanError
    from pgasdl.errors import PoolFullError as PoolFullError
    from pgasdl.errors import QueueError as QueueError
    from pgasdl.errors import QueueFullError as QueueFullError
    from pgasdl.errors import RankError as RankError
    from pgasdl.errors import SegmentError as SegmentError
    from pgasdl.errors import UnavailableError as UnavailableError
    from pgasdl.footprint import Footprint as Footprint
    from pgasdl.group import Group as Group
    from pgasdl.runtime.init import init as init
    from pgasdl.runtime.join import join as join
    from pgasdl.segment import Segment as Segment
    from pgasdl.training.exchange import GradientExchange as GradientExchange
    from pgasdl.training.owner import Block as Block
    from pgasdl.versions import show_versions as show_versions

_HOMES = {
    "config": ["Limits"],
    "context": ["Context"],
    "counters": ["Counters", "LayerTimes", "Traffic", "Waits"],
    "errors": [
        "AlignmentError",
        "BootstrapError",
        "BufferRefusedError",
        "CheckpointError",
        "ClosedError",
        "ConfigError",
        "DataError",
        "JobError",
        "LayoutError",
        "MismatchError",
        "NotificationError",
        "PeerLostError",
        "PgasError",
        "PgasTimeoutError",
        "PlanError",
        "PoolFullError",
        "QueueError",
        "QueueFullError",
        "RankError",
        "SegmentError",
        "UnavailableError",
    ],
    "footprint": ["Footprint"],
    "group": ["Group"],
    "segment": ["Segment"],
    "collectives.handle": ["Collective"],
    "training.exchange": ["GradientExchange"],
    "training.owner": ["Block"],
    "runtime.init": ["init"],
    "runtime.join": ["join"],
    "versions": ["show_versions"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name == "_native":  # `from pgasdl import _native` asks here first
        return _load_native()
    if name == "__version__":  # pyproject.toml has it
        from importlib.metadata import version

        return version("pgasdl")
    module = _HOME_OF.get(name)
    if module is None:
        from pgasdl.errors import of_old_name

        return of_old_name(name, "pgasdl")
    value = getattr(import_module(f"pgasdl.{module}"), name)
    globals()[name] = value
    return value


def _load_native() -> Any:
    """Return the compiled part. Raises ImportError that says what to do where there is none."""
    try:
        return import_module("pgasdl._native")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{__path__[0]} has no compiled part (pgasdl._native), and no other pgasdl is "
            "installed: pip install ."
        ) from error


def _leave_source_folder() -> None:
    """Load the installed package's modules if this is the source folder.

    A program in the root of a clone finds the source folder first, which has no compiled part.
    """
    import sys
    from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
    from os.path import dirname, exists, realpath

    def is_compiled(folders: Iterable[str]) -> bool:
        names = [f"{folder}/_native{suffix}" for folder in folders for suffix in EXTENSION_SUFFIXES]
        return any(map(exists, names))

    if is_compiled(__path__):
        return
    here = realpath(dirname(__path__[0]))
    spec = PathFinder.find_spec("pgasdl", [at for at in sys.path if realpath(at) != here])
    if spec is not None and spec.origin and is_compiled(spec.submodule_search_locations or ()):
        __path__[:] = spec.submodule_search_locations or ()
        globals()["__file__"] = spec.origin


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])


_leave_source_folder()
