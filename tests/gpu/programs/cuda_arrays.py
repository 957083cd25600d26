"""Arrays and streams of a GPU for programs without PyTorch and CuPy: the driver by ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

_driver = ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    result = getattr(_driver, name)(*arguments)
    assert result == 0, f"{name} returned {result}"


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
        call(
            "cuMemcpyAsync",
            ctypes.c_uint64(to),
            ctypes.c_uint64(source),
            ctypes.c_size_t(nbytes),
            ctypes.c_void_p(self.handle),
        )

    def synchronize(self) -> None:
        """Wait until all that was enqueued has ended."""
        call("cuStreamSynchronize", ctypes.c_void_p(self.handle))


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
            call("cuMemAlloc_v2", ctypes.byref(allocated), ctypes.c_size_t(max(1, self.nbytes)))
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
    call("fakeSetCapturing", ctypes.c_void_p(stream.handle), 1)
    yield
    call("fakeSetCapturing", ctypes.c_void_p(stream.handle), 0)
