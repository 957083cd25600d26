"""``pgasdl.show_versions()``: the versions that a report of a defect needs."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import re
import sysconfig
from pathlib import Path

from pgasdl import errors
from pgasdl.kernel import read_line
from pgasdl.runtime.launch import mpiexec

PACKAGES = ("numpy", "ml_dtypes", "torch", "cupy", "mpi4py")
MISSING = "not installed"


def show_versions(*, as_json: bool = False) -> None:
    """Print the versions of what pgasdl runs on: paste them into a report of a defect.

    Python, the kernel and the C library, pgasdl and its compiled part, NumPy, PyTorch, MPIs,
    libibverbs, the GPU's driver, and which transports this build has. Nothing is started, and
    PyTorch is not imported; ``pgasdl doctor`` also tries what it lists.

    Parameters
    ----------
    as_json : print one JSON document in place of the table
    """
    found = versions()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for name, version in found.items():
        print(f"{name:<{width}}  {version}")


def versions() -> dict[str, str]:
    """Return what ``show_versions`` prints, by name."""
    return {
        "pgasdl": f"{_installed('pgasdl')}, {Path(__file__).parent}",
        "native module": _native(),
        "python": _python(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "system": _system(),
        **{name: _installed(name) for name in PACKAGES},
        **{kind: _mpi(kind) for kind in mpiexec.LAUNCHERS},
        "libibverbs": _verbs_library(),
        "NVIDIA driver": read_line("/sys/module/nvidia/version") or "not loaded",
        "transports": _transports(),
    }


def _python() -> str:
    kind = ", free-threaded" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    return f"{platform.python_implementation()} {platform.python_version()}{kind}"


def _system() -> str:
    library = " ".join(platform.libc_ver()).strip() or "C library unknown"
    with contextlib.suppress(OSError):
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {library}"
    return library


def _installed(name: str) -> str:
    """Return the version of an installed package, without importing it."""
    for distribution in importlib.metadata.packages_distributions().get(name, [name]):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return MISSING


def _native() -> str:
    try:
        from pgasdl import _native

        return f"kernels for {_native.isa}"
    except ImportError as error:
        return f"cannot be imported: {error}"


def _transports() -> str:
    with contextlib.suppress(ImportError):
        from pgasdl import _native

        rows = _native.transports().items()
        return ", ".join(f"{name} ({why})" if why else name for name, why in rows)
    return "none: no native module"


def _mpi(kind: str) -> str:
    """Return an MPI's library, which has its version in its name, and its wheel's version."""
    try:
        library = os.path.realpath(mpiexec.find(kind).library)
    except errors.PgasError:
        return MISSING
    wheel = _installed(kind)
    return library if wheel == MISSING else f"{wheel}, {library}"


def _verbs_library() -> str:
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return MISSING
    with contextlib.suppress(OSError):
        mapped = re.search(r"/\S*/libibverbs\.so\S*", Path("/proc/self/maps").read_text())
        if mapped is not None:
            return os.path.realpath(mapped[0])
    return "loads"
