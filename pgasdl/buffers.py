"""What kind of memory an object offers: address, size and dtype, or a clear refusal.

It understands NumPy arrays (ml_dtypes too), PyTorch tensors (bfloat16 too), segments, and anything
with ``__array_interface__`` or the buffer protocol. It never copies.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pgasdl.errors import BufferRefused

# Every dtype that the native core reduces, by the core's name.
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}
# Layers, blocks and copies begin at cache lines; two ranks' writes never share one.
ALIGNMENT = 64

_NATIVE = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Memory:
    """``nbytes`` at ``address``; ``owner`` keeps them alive."""

    address: int
    nbytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    owner: object

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.nbytes // self.dtype.itemsize

    @property
    def native_dtype(self) -> str:
        """The core's name of the dtype; BufferRefused if it has no arithmetic for it."""
        return native_dtype(self.dtype)


def aligned(nbytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def native_dtype(dtype: npt.DTypeLike) -> str:
    """Return the core's name of a dtype ("float32", "bfloat16" ...).

    Raises
    ------
    BufferRefused
        Not float32, float64, float16, bfloat16, int32 or int64.
    """
    name = _NATIVE.get(np.dtype(as_numpy_dtype(dtype)))
    if name is None:
        raise BufferRefused(f"dtype {dtype} cannot be reduced; there are {', '.join(DTYPES)}")
    return name


def as_numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Return a NumPy dtype from a NumPy or PyTorch dtype, or one of the core's names."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return np.dtype(DTYPES[dtype])
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        name = str(dtype).removeprefix("torch.")
        dtype = ml_dtypes.bfloat16 if name == "bfloat16" else name
    converted: np.dtype[Any] = np.dtype(dtype)
    return converted


def memory_of(buffer: object, *, writable: bool = True) -> Memory:
    """Describe a buffer.

    Parameters
    ----------
    buffer : object
        C-contiguous memory on the host.
    writable : bool, default True
        Refuse memory that may not be written to.

    Raises
    ------
    BufferRefused
        Strided, read-only, on a device, or no memory at all.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        return _of_tensor(buffer)
    if isinstance(buffer, np.ndarray):
        return _of_array(buffer, writable)
    try:
        array = np.asarray(memoryview(buffer))  # type: ignore[arg-type]
    except TypeError:
        interface = getattr(buffer, "__array_interface__", None)
        if interface is None:
            raise BufferRefused(
                f"{type(buffer).__name__} offers no memory: pass an array, a tensor, a segment, or "
                "anything with the buffer protocol"
            ) from None
        array = np.asarray(buffer)
    return _of_array(array, writable, owner=buffer)


def _of_array(array: npt.NDArray[Any], writable: bool, owner: object | None = None) -> Memory:
    if not array.flags.c_contiguous:
        raise BufferRefused(
            f"an array of shape {array.shape} with strides {array.strides} is not contiguous: "
            "pass numpy.ascontiguousarray(array)"
        )
    if writable and not array.flags.writeable:
        raise BufferRefused("the array is read-only, and peers or the result would write into it")
    address = array.__array_interface__["data"][0]
    return Memory(
        address, array.nbytes, array.dtype, array.shape, array if owner is None else owner
    )


def _of_tensor(tensor: Any) -> Memory:
    if tensor.device.type != "cpu":
        raise BufferRefused(f"a tensor on {tensor.device}: only host memory so far; copy it first")
    if not tensor.is_contiguous():
        raise BufferRefused(
            f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not "
            "contiguous: pass tensor.contiguous()"
        )
    dtype = as_numpy_dtype(tensor.dtype)
    return Memory(
        tensor.data_ptr(),
        tensor.numel() * tensor.element_size(),
        dtype,
        tuple(tensor.shape),
        tensor,
    )
