"""The memory that an object offers: address, size and dtype, or a clear refusal.

It understands NumPy arrays (ml_dtypes too), PyTorch tensors (bfloat16 too), segments, and anything
with ``__array_interface__`` or the buffer protocol; on GPUs also CuPy's arrays, and anything with
``__cuda_array_interface__`` or DLPack. It never copies.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pgasdl.device.arrays import describe, on_device
from pgasdl.device.names import name_of
from pgasdl.errors import BufferRefusedError

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
    """``nbytes`` at ``address``; ``owner`` keeps them alive and where they are."""

    address: int
    nbytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    owner: object
    device: int | None = None  # the GPU that they lie on; None: the host's memory

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.nbytes // self.dtype.itemsize

    @property
    def native_dtype(self) -> str:
        """The core's name of the dtype; BufferRefusedError if it has no arithmetic for it."""
        return native_dtype(self.dtype)

    def on_host(self) -> npt.NDArray[np.uint8]:
        """Return the bytes, which lie on the host, as a NumPy array."""
        assert self.device is None
        return np.asarray(_Bytes(self))


class _Bytes:
    """Memory in a form that NumPy takes; it keeps its owner."""

    def __init__(self, memory: Memory) -> None:
        self._owner = memory.owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (memory.nbytes,),
            "data": (memory.address, False),
        }


def aligned(nbytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def native_dtype(dtype: npt.DTypeLike) -> str:
    """Return the core's name of a dtype; BufferRefusedError: it is none of :data:`DTYPES`."""
    name = _NATIVE.get(np.dtype(as_numpy_dtype(dtype)))
    if name is None:
        raise BufferRefusedError(f"dtype {dtype} cannot be reduced; there are {', '.join(DTYPES)}")
    return name


def as_numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Return a NumPy dtype from a NumPy or PyTorch dtype, or one of the core's names."""
    if isinstance(dtype, np.dtype):
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return np.dtype(DTYPES[dtype])
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        name = str(dtype).removeprefix("torch.")
        dtype = ml_dtypes.bfloat16 if name == "bfloat16" else name
    converted: np.dtype[Any] = np.dtype(dtype)
    return converted


def memory_of(buffer: object, *, writable: bool = True, device: bool = False) -> Memory:
    """Describe a buffer; BufferRefusedError: strided, read-only, on a device, or no memory at all.

    ``writable`` False takes memory that may not be written to. ``device`` True takes memory on a
    GPU, without a wait for work on it; UnavailableError: none can be used here.
    """
    if not device:
        require_host(buffer)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        return _of_tensor(buffer)
    if isinstance(buffer, np.ndarray):
        return _of_array(buffer, writable)
    if on_device(buffer):
        return _of_device(buffer, writable)
    try:
        array = np.asarray(memoryview(buffer))  # type: ignore[arg-type]
    except TypeError:
        interface = getattr(buffer, "__array_interface__", None)
        if interface is None:
            raise BufferRefusedError(
                f"{type(buffer).__name__} offers no memory: pass an array, a tensor, a segment, or "
                "anything with the buffer protocol"
            ) from None
        array = np.asarray(buffer)
    return _of_array(array, writable)  # an export of the buffer, which is not resized meanwhile


def require_host(buffer: object) -> None:
    """Raise BufferRefusedError for memory on a device."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        if buffer.device.type != "cpu":
            raise BufferRefusedError(f"a tensor on {buffer.device}: only host memory works here")
    elif not isinstance(buffer, np.ndarray) and on_device(buffer):
        raise BufferRefusedError(f"{type(buffer).__name__} on a GPU: only host memory works here")


def _of_array(array: npt.NDArray[Any], writable: bool) -> Memory:
    if not array.flags.c_contiguous:
        raise BufferRefusedError(
            f"an array of shape {array.shape} with strides {array.strides} is not contiguous: "
            "pass numpy.ascontiguousarray(array)"
        )
    if writable and not array.flags.writeable:
        raise BufferRefusedError(
            "the array is read-only, and peers or the result would write into it"
        )
    address = array.__array_interface__["data"][0]
    return Memory(address, array.nbytes, array.dtype, array.shape, array)


def _of_device(buffer: object, writable: bool) -> Memory:
    found = describe(buffer, writable=writable)
    if not found.contiguous:
        raise BufferRefusedError(
            f"an array of shape {found.shape} on {name_of(found.ordinal)} is not contiguous: pass "
            "a contiguous copy"
        )
    if writable and found.read_only:
        raise BufferRefusedError(
            "the array is read-only, and peers or the result would write into it"
        )
    nbytes = math.prod(found.shape) * found.dtype.itemsize
    return Memory(found.address, nbytes, found.dtype, found.shape, found.owner, found.ordinal)


def _of_tensor(tensor: Any) -> Memory:
    if tensor.device.type not in ("cpu", "cuda"):
        raise BufferRefusedError(
            f"a tensor on {tensor.device}: only the host's memory and CUDA's work"
        )
    if not tensor.is_contiguous():
        raise BufferRefusedError(
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
        tensor.device.index if tensor.device.type == "cuda" else None,
    )
