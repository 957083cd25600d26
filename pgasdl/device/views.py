"""Memory on a GPU as other libraries take it, without a copy.

PyTorch and CuPy take it by DLPack, which names the GPU. With ``__cuda_array_interface__`` they
would ask the driver where the memory lies; a peer's memory lies elsewhere than where it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from pgasdl import _native
from pgasdl.device.names import name_of

_CUDA = 2  # DLPack's


class DeviceBytes:
    """Bytes that the GPU ``ordinal`` can load and store; they keep their owner."""

    def __init__(self, owner: object, address: int, nbytes: int, ordinal: int) -> None:
        self._owner, self._address = owner, address
        self.nbytes, self.ordinal = nbytes, ordinal

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.nbytes,),
            "strides": None,
            "data": (self._address if self.nbytes else 0, False),
            "stream": None,
        }

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("memory of a segment is not copied on the way out")
        return _native.device_capsule(self._owner, self._address, self.nbytes, self.ordinal)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CUDA, self.ordinal)


def cupy_view(raw: DeviceBytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Return a CuPy array over ``raw``."""
    cupy = import_module("cupy")
    if raw.nbytes == 0:
        with cupy.cuda.Device(raw.ordinal):
            return cupy.empty(shape, dtype)
    return cupy.from_dlpack(raw).view(dtype).reshape(shape)


def torch_view(raw: DeviceBytes, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return a PyTorch tensor over ``raw``."""
    import torch
    from torch.utils.dlpack import from_dlpack

    if raw.nbytes == 0:
        return torch.empty(shape, dtype=dtype, device=name_of(raw.ordinal))
    return from_dlpack(raw).view(dtype).reshape(shape)
