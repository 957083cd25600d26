"""Plugins: modules that register more plans; ``PGASDL_PLAN_MODULES`` names them.

A context imports them before it reads its policy, so that the policy may name their plans.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading

from pgasdl.errors import ConfigError
from pgasdl.plans.registry import OWN, PLANS

_ALONE = threading.Lock()  # one import at a time: ranks may be threads of one process


def names() -> tuple[str, ...]:
    """Return the names of the plans from outside the package, sorted."""
    return tuple(sorted(PLANS.keys() - OWN))


def load(modules: str) -> None:
    """Import modules, names or ``.py`` files, so that they register their plans; each once.

    ConfigError: a module is not found, fails, or registers nothing.
    """
    for name in filter(None, (part.strip() for part in modules.split(","))):
        with _ALONE:
            _load(name, _origin(name))


def require_found(modules: str) -> None:
    """Raise ConfigError for a module that :func:`load` would not find.

    It runs only the packages that the module lies in.
    """
    for name in filter(None, (part.strip() for part in modules.split(","))):
        _origin(name)


def _origin(name: str) -> str:
    """Return the file of a module, or another name of its source."""
    if name.endswith(".py"):
        if not os.path.isfile(name):
            raise ConfigError(f"plan module {name}: no such file in {os.getcwd()}")
        return os.path.realpath(name)
    if (there := sys.modules.get(name)) is not None:
        return os.path.realpath(getattr(there, "__file__", None) or name)
    try:
        spec = importlib.util.find_spec(name)
    except (Exception, SystemExit) as error:
        raise _refused(name, error) from error
    if spec is None:
        raise ConfigError(
            f"plan module {name}: not found; give the path of its .py file, or its folder in "
            "PYTHONPATH"
        )
    return os.path.realpath(spec.origin or name)


def _load(name: str, origin: str) -> None:
    # The program itself may be such a module, and the same file may have another module name.
    if _of(origin):
        return
    before = len(PLANS)
    try:
        _import(name, origin)
    except (Exception, SystemExit) as error:
        raise _refused(name, error) from error
    if len(PLANS) == before:
        for added in _of(origin):
            del sys.modules[added]
        raise ConfigError(
            f"plan module {name}: registers no plan; it must call pgasdl.plans.register when it "
            "is imported"
        )


def _import(name: str, origin: str) -> None:
    if not name.endswith(".py"):
        importlib.import_module(name)
        return
    stem = os.path.splitext(os.path.basename(origin))[0]
    spec = importlib.util.spec_from_file_location(origin if stem in sys.modules else stem, origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise


def _of(origin: str) -> list[str]:
    """Return the names of the modules that were loaded from a file."""
    last = os.path.basename(origin)
    return [
        name
        for name, module in list(sys.modules.items())
        if os.path.basename(getattr(module, "__file__", None) or "") == last
        and os.path.realpath(str(module.__file__)) == origin
    ]


def _refused(name: str, error: BaseException) -> ConfigError:
    return ConfigError(f"plan module {name}: cannot be imported: {type(error).__name__}: {error}")
