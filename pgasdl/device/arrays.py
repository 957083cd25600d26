"""Memory on a GPU as objects describe it: by ``__cuda_array_interface__``, or by DLPack."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from pgasdl import _native
from pgasdl.device.names import current_ordinal, name_of
from pgasdl.errors import BufferRefusedError

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Device types of DLPack: CUDA, and memory that CUDA moves between host and GPU.
_CUDA = (2, 13)
# DLPack's codes: of types that NumPy has in every size; and of two, each in one size.
_KINDS = {0: "i", 1: "u", 2: "f", 5: "c"}
_SINGLE = {(4, 16): _BFLOAT16, (6, 8): np.dtype(bool)}


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """An array on a GPU as its library describes it; ``owner`` keeps the memory."""

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    contiguous: bool
    read_only: bool
    ordinal: int
    owner: object


def on_device(buffer: object) -> bool:
    """Whether an object claims to have CUDA memory."""
    if hasattr(buffer, "__cuda_array_interface__"):
        return True
    ask = getattr(buffer, "__dlpack_device__", None)
    return ask is not None and ask()[0] in _CUDA


def describe(buffer: Any, *, writable: bool) -> DeviceArray:
    """Describe an object that is :func:`on_device`; ``writable``: it will be written to.

    BufferRefusedError: its description is wrong, or not understood. UnavailableError: no GPU here.
    """
    interface = getattr(buffer, "__cuda_array_interface__", None)
    if interface is None:
        return _of_dlpack(buffer, writable)
    return _of_interface(buffer, interface)


def _of_interface(buffer: object, interface: dict[str, Any]) -> DeviceArray:
    if interface.get("mask") is not None:
        raise BufferRefusedError("an array with a mask: pass the plain array")
    try:
        address, read_only = interface["data"]
        shape = tuple(int(extent) for extent in interface["shape"])
        dtype = np.dtype(interface["typestr"])
        strides = interface.get("strides")
    except (KeyError, TypeError, ValueError) as error:
        raise BufferRefusedError(
            f"a __cuda_array_interface__ that is not understood: {error}"
        ) from None
    # The protocol has no name for bfloat16: CuPy passes it as two bytes.
    if dtype.kind == "V" and getattr(buffer, "dtype", None) == _BFLOAT16:
        dtype = _BFLOAT16
    packed = _packed_strides(shape, dtype.itemsize)
    contiguous = strides is None or math.prod(shape) == 0 or _same(shape, strides, packed)
    # Nothing lies at the address of an empty array.
    ordinal = _native.cuda_device_of(address) if math.prod(shape) else current_ordinal()
    return DeviceArray(address or 0, dtype, shape, contiguous, bool(read_only), ordinal, buffer)


def _of_dlpack(buffer: object, writable: bool) -> DeviceArray:
    taken = _native.dlpack_memory(buffer, writable)
    code, bits = taken.type_code, taken.type_bits
    dtype = _SINGLE.get((code, bits))
    if dtype is None and code in _KINDS:
        dtype = np.dtype(f"{_KINDS[code]}{bits // 8}")
    if dtype is None or taken.type_lanes != 1:
        raise BufferRefusedError(
            f"an array of DLPack's type {code} with {bits} bits and {taken.type_lanes} lanes on "
            f"{name_of(taken.device)}, which NumPy does not have"
        )
    return DeviceArray(
        taken.address, dtype, taken.shape, taken.contiguous, False, taken.device, taken
    )


def _packed_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[k + 1 :]) for k in range(len(shape)))


def _same(shape: tuple[int, ...], strides: tuple[int, ...], packed: tuple[int, ...]) -> bool:
    """Whether strides agree wherever there is more than one element."""
    return all(a == b for extent, a, b in zip(shape, strides, packed, strict=True) if extent != 1)
