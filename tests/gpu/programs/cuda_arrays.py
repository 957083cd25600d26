"""Arrays and streams of a GPU for programs without PyTorch and CuPy: the CUDA driver by ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

_TYPES = {
    "b": ctypes.c_uint8, "u": ctypes.c_uint32, "i": ctypes.c_int, "q": ctypes.c_uint64,
    "s": ctypes.c_size_t, "p": ctypes.c_void_p, "c": ctypes.c_char_p,
}  # fmt: skip
# The types that Python integers become: by default ctypes passes 32 bits.
_PARAMETERS = {
    "cuInit": "u", "cuDriverGetVersion": "p", "cuGetErrorName": "ip", "cuDeviceGetName": "pii",
    "cuDeviceGetAttribute": "pii", "cuDeviceTotalMem_v2": "pi",
    "cuDevicePrimaryCtxRetain": "pi", "cuCtxPushCurrent_v2": "p", "cuCtxPopCurrent_v2": "p",
    "cuMemAlloc_v2": "ps", "cuMemFree_v2": "q", "cuMemcpyAsync": "qqsp",
    "cuMemHostRegister_v2": "psu", "cuMemHostUnregister": "p",
    "cuMemHostGetDevicePointer_v2": "ppu",
    "cuStreamCreateWithPriority": "pui", "cuStreamSynchronize": "p", "cuStreamQuery": "p",
    "cuStreamWaitValue32_v2": "pquu", "cuStreamWriteValue32_v2": "pquu",
    "cuStreamWaitEvent": "ppu", "cuEventCreate": "pu", "cuEventRecord": "pp", "cuEventQuery": "p",
    "cuModuleLoadData": "pc", "cuModuleGetFunction": "ppc", "cuLaunchKernel": "puuuuuuuppp",
    "cuStreamBeginCapture_v2": "pi", "cuStreamEndCapture": "pp",
    "cuGraphInstantiateWithFlags": "ppq", "cuGraphLaunch": "pp", "fakeSetCapturing": "pi",
}  # fmt: skip


class NotAvailable(Exception):
    """Something that a program needs is not here; says why."""


class DriverError(Exception):
    """The driver refused a call."""

    def __init__(self, name: str, result: int) -> None:
        words = ctypes.c_char_p()
        result_of("cuGetErrorName", result, ctypes.byref(words))
        super().__init__(f"{name}: {(words.value or b'?').decode()} ({result})")
        self.result = result


@functools.cache
def entry(name: str) -> Callable[..., int]:
    """A function of the driver; NotAvailable: there is none."""
    try:
        found = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError) as missing:
        raise NotAvailable(str(missing)) from None
    found.argtypes = [_TYPES[each] for each in _PARAMETERS[name]]
    return found  # type: ignore[no-any-return]


def result_of(name: str, *arguments: Any) -> int:
    """The result of a call."""
    return entry(name)(*arguments)


def call(name: str, *arguments: Any) -> None:
    """Call the driver; DriverError: it refuses."""
    if result := result_of(name, *arguments):
        raise DriverError(name, result)


class Device:
    """A GPU whose primary context is current in this thread, for a ``with`` statement."""

    def __init__(self, ordinal: int = 0) -> None:
        self._context = ctypes.c_void_p()
        call("cuInit", 0)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), ordinal)

    def __enter__(self) -> Device:
        call("cuCtxPushCurrent_v2", self._context)
        return self

    def __exit__(self, *_: object) -> None:
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class Stream:
    """A stream; pgasdl takes it by the protocol that PyTorch and CuPy follow, too.

    ``handle`` : of one that is there; 0: the default stream
    """

    def __init__(self, priority: int = 0, *, handle: int | None = None) -> None:
        made = ctypes.c_void_p(handle)
        if handle is None:
            call("cuStreamCreateWithPriority", ctypes.byref(made), 1, priority)
        self.handle = made.value or 0

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Enqueue a copy; it is made later."""
        call("cuMemcpyAsync", to, source, nbytes, self.handle)

    def synchronize(self) -> None:
        """Wait until all that was enqueued has ended."""
        call("cuStreamSynchronize", self.handle)


class Array:
    """Memory of the current GPU, outside of segments or (``address``) somewhere else's."""

    def __init__(self, count: int, dtype: npt.DTypeLike, address: int | None = None) -> None:
        self.dtype, self.count = np.dtype(dtype), count
        self.nbytes = count * self.dtype.itemsize
        self.address = address
        self.keep: object = None
        self._source: Array | None = None
        if address is None:
            allocated = ctypes.c_uint64()
            call("cuMemAlloc_v2", ctypes.byref(allocated), max(1, self.nbytes))
            self.address = allocated.value

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "typestr": "<V2" if self.dtype.kind == "V" else self.dtype.str,
            "shape": (self.count,),
            "strides": None,
            "data": (self.address, False),
        }

    def fill(self, values: npt.NDArray[Any], stream: Stream) -> None:
        """Enqueue that it gets these values, which the stream does late, as a kernel would."""
        assert values.dtype == self.dtype and values.size == self.count
        assert self.address is not None
        if self._source is None:
            self._source = Array(self.count, self.dtype)
        assert self._source.address is not None
        stream.copy(self._source.address, values.ctypes.data, self.nbytes)  # waits: it is pageable
        stream.copy(self.address, self._source.address, self.nbytes)

    def values(self, stream: Stream) -> npt.NDArray[Any]:
        """The content after all that was enqueued on the stream."""
        found = np.empty(self.count, self.dtype)
        assert self.address is not None
        stream.synchronize()  # the copy holds up the driver: it is pageable
        stream.copy(found.ctypes.data, self.address, self.nbytes)
        stream.synchronize()
        return found


class _FromDlpack:
    """Memory that CuPy would take by DLPack, whose library is not there: an array that keeps it."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._dtype = np.dtype(np.uint8)

    def view(self, dtype: npt.DTypeLike) -> _FromDlpack:
        self._dtype = np.dtype(dtype)
        return self

    def reshape(self, shape: tuple[int, ...]) -> Array:
        assert math.prod(shape) * self._dtype.itemsize == self._raw.nbytes
        array = Array(math.prod(shape), self._dtype, self._raw.__cuda_array_interface__["data"][0])
        array.keep = self._raw
        return array


class _Cupy:
    """In place of CuPy, whose library is not there: what takes memory, and the current stream."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self.users = 0
        self.from_dlpack = _FromDlpack
        device = type("Device", (), {})
        self.cuda = SimpleNamespace(Device=device, get_current_stream=self._current_stream)

    def use(self, stream: Stream) -> None:
        """Let a stream be this thread's current one."""
        self._of_thread.stream = stream

    def _current_stream(self, ordinal: int) -> Stream:
        stream: Stream = self._of_thread.stream
        return stream


_standing_in = threading.RLock()  # ranks that are threads share sys.modules
_cupy = _Cupy()


@contextlib.contextmanager
def cupy(stream: Stream) -> Iterator[None]:
    """Let programs find a stand-in for CuPy, whose current stream in this thread is ``stream``."""
    _cupy.use(stream)
    with _standing_in:
        _cupy.users += 1
        sys.modules["cupy"] = _cupy  # type: ignore[assignment]
    try:
        yield
    finally:
        with _standing_in:
            _cupy.users -= 1
            if _cupy.users == 0:
                del sys.modules["cupy"]


def cut(ctx: Any, count: int, dtype: npt.DTypeLike, like: Array | None = None) -> Array:
    """Cut an array from the context's pool on GPU 0; a stand-in for CuPy makes it."""
    with cupy(Stream(handle=0)):
        array = ctx.empty_like(like) if like else ctx.empty(count, dtype, device="cuda:0")
    assert isinstance(array, Array) and (array.count, array.dtype) == (count, dtype)
    return array


@contextlib.contextmanager
def capturing(stream: Stream) -> Iterator[None]:
    """Let the fake driver say that a stream records a graph."""
    call("fakeSetCapturing", stream.handle, 1)
    yield
    call("fakeSetCapturing", stream.handle, 0)
