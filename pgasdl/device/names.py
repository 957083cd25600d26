"""Names of devices: "cpu", "cuda", "cuda:1", and the objects that PyTorch and CuPy have for them.

A GPU is an ordinal, as CUDA counts those that the process sees; the host is None.
"""

from __future__ import annotations

import re
import sys

from pgasdl import _native
from pgasdl.errors import ConfigError, UnavailableError

_NAME = re.compile(r"(cpu|cuda)(?::([0-9]{1,4}))?", re.ASCII)


def ordinal_of(device: object) -> int | None:
    """Return a GPU's ordinal; None for the host.

    ``device`` : "cpu"; "cuda:1"; "cuda", the current device of PyTorch or CuPy, else 0; or an
    object of theirs. ConfigError: it names no device. UnavailableError: there is no such GPU; says
    which there are.
    """
    kind, index = _parts(device)
    if kind == "cpu":
        return None
    count = _native.cuda_device_count()
    if count == 0:
        raise UnavailableError(f"device {device!s:.100}: {_native.cuda_missing()}")
    ordinal = current_ordinal() if index is None else index
    if ordinal >= count:
        there = ", ".join(
            f"{name_of(info.ordinal)} ({info.name})" for info in _native.cuda_devices()
        )
        raise UnavailableError(f"device {device!s:.100}: this process sees {there}")
    return ordinal


def name_of(ordinal: int | None) -> str:
    """Return the name of a device: "cpu", or such as "cuda:1"."""
    return "cpu" if ordinal is None else f"cuda:{ordinal}"


def current_ordinal() -> int:
    """Return the current GPU of PyTorch if it uses CUDA here, else of CuPy if loaded, else 0."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    cupy = sys.modules.get("cupy")
    return 0 if cupy is None else int(cupy.cuda.runtime.getDevice())


def _parts(device: object) -> tuple[str, int | None]:
    """Return "cpu" or "cuda", and the ordinal that was named."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    name = device
    if torch is not None and isinstance(device, torch.device):
        name = str(device)
    elif cupy is not None and isinstance(device, cupy.cuda.Device):
        name = f"cuda:{device.id}"
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        meant = f'; "cuda:{device}" is a GPU' if type(device) is int and device >= 0 else ""
        raise ConfigError(
            f'device {device!s:.100} is refused: it must be "cpu", "cuda", or such as "cuda:1"'
            f"{meant}"
        )
    return match[1], None if match[2] is None else int(match[2])
