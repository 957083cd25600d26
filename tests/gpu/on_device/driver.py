"""More of the CUDA driver than arrays and streams: kernels, words, pinned memory, graphs."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cuda_arrays import DriverError, NotAvailable, Stream, call, result_of

NOT_READY = 600


def require_gpu() -> None:
    """NotAvailable: no driver, or no GPU."""
    try:
        call("cuInit", 0)
    except DriverError as error:
        raise NotAvailable(str(error)) from None


def attribute(number: int) -> int | None:
    """An attribute of the first GPU; None: the driver does not know it."""
    value = ctypes.c_int()
    failed = result_of("cuDeviceGetAttribute", ctypes.byref(value), number, 0)
    return None if failed else value.value


def multiprocessors() -> int:
    """The attribute of the first GPU."""
    return attribute(16) or 1


def free(address: int | None) -> None:
    """Give back memory of an Array that is not used any more."""
    call("cuMemFree_v2", address)


# --- streams


def passed(stream: Stream) -> bool:
    """Whether all that was enqueued has ended."""
    result = result_of("cuStreamQuery", stream.handle)
    if result not in (0, NOT_READY):
        raise DriverError("cuStreamQuery", result)
    return result == 0


def wait_value(stream: Stream, address: int, value: int) -> None:
    """Let a stream wait until a word has reached a value."""
    call("cuStreamWaitValue32_v2", stream.handle, address, value, 0)


def write_value(stream: Stream, address: int, value: int) -> None:
    """Let a stream write a word."""
    call("cuStreamWriteValue32_v2", stream.handle, address, value, 0)


class Event:
    """A moment of a stream."""

    def __init__(self) -> None:
        handle = ctypes.c_void_p()
        call("cuEventCreate", ctypes.byref(handle), 2)
        self.handle = handle.value

    def record(self, stream: Stream) -> None:
        call("cuEventRecord", self.handle, stream.handle)

    def reached(self) -> bool:
        return result_of("cuEventQuery", self.handle) == 0


# --- host memory that the device reaches


class Pinned:
    """Pages that are registered: ``address`` is the host's, ``device`` the GPU's.

    ``registered`` : seconds that registering took
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._pages = mmap.mmap(-1, nbytes)
        self.words = (ctypes.c_uint32 * (nbytes // 4)).from_buffer(self._pages)
        self.address = ctypes.addressof(self.words)
        ctypes.memset(self.address, 0, nbytes)
        began = time.perf_counter()
        call("cuMemHostRegister_v2", self.address, nbytes, 3)
        self.registered = time.perf_counter() - began
        device = ctypes.c_uint64()
        call("cuMemHostGetDevicePointer_v2", ctypes.byref(device), self.address, 0)
        self.device = device.value

    def __del__(self) -> None:
        # Before the pages are freed: their addresses may be reused. Fails after the device's end.
        with suppress(DriverError):
            call("cuMemHostUnregister", self.address)


# --- kernels


class Kernel:
    """A kernel of a module; ``loaded``: seconds that the module took."""

    def __init__(self, ptx: str, *names: str) -> None:
        module = ctypes.c_void_p()
        text = ptx.encode() + b"\0"
        began = time.perf_counter()
        call("cuModuleLoadData", ctypes.byref(module), text)
        self.loaded = time.perf_counter() - began
        self._functions = {}
        for name in names:
            function = ctypes.c_void_p()
            call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            self._functions[name] = function

    def launch(self, name: str, stream: Stream, grid: int, block: int, *parameters: Any) -> None:
        """Launch one; parameters are objects of ctypes."""
        pointers = (ctypes.c_void_p * len(parameters))(*map(ctypes.addressof, parameters))
        call(
            "cuLaunchKernel", self._functions[name],
            grid, 1, 1, block, 1, 1, 0, stream.handle, pointers, None,
        )  # fmt: skip


class Work:
    """A kernel that computes: on all multiprocessors, or on one block."""

    NAME = "on_device_work"

    def __init__(self) -> None:
        self._kernel = Kernel(Path(__file__).with_name("work.ptx").read_text(), self.NAME)
        self._all = 2 * multiprocessors()
        self._per_second = 0.0

    def turns(self, stream: Stream, turns: int, grid: int | None = None) -> None:
        """Enqueue so many turns of the kernel's loop; 0: a kernel that does nothing."""
        self._kernel.launch(
            self.NAME, stream, self._all if grid is None else grid, 256,
            ctypes.c_uint64(turns), ctypes.c_uint64(0),
        )  # fmt: skip

    def seconds(self, stream: Stream, seconds: float) -> None:
        """Enqueue a kernel that takes so long where it has the device for itself."""
        if not self._per_second:
            self.calibrate(stream)
        self.turns(stream, int(seconds * self._per_second))

    def fill(self, stream: Stream, seconds: float) -> None:
        """Enqueue a kernel that takes so long, and leaves no place for another one."""
        self.turns(stream, int(seconds * self._per_second / 4), 4 * self._all)

    def calibrate(self, stream: Stream) -> None:
        """Find how fast the loop is; the device should be idle."""
        self.turns(stream, 1000)
        stream.synchronize()
        turns, taken = 1000, 0.0
        while taken < 2e-3:
            turns *= 4
            began = time.perf_counter()
            self.turns(stream, turns)
            stream.synchronize()
            taken = time.perf_counter() - began
        self._per_second = turns / taken


# --- graphs

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


class Capture:
    """Make a graph of the work that a stream is given during the ``with`` block."""

    def __init__(self, stream: Stream, mode: int = THREAD_LOCAL) -> None:
        self._stream, self._mode = stream, mode
        self._graph = ctypes.c_void_p()
        self._executable = ctypes.c_void_p()

    def __enter__(self) -> Capture:
        call("cuStreamBeginCapture_v2", self._stream.handle, self._mode)
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        result = result_of("cuStreamEndCapture", self._stream.handle, ctypes.byref(self._graph))
        if result and failed is None:
            raise DriverError("cuStreamEndCapture", result)

    def launch(self) -> None:
        """Replay it on the stream."""
        if not self._executable.value:
            call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), self._graph, 0)
        call("cuGraphLaunch", self._executable, self._stream.handle)


# --- time


def timed(call_: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    call_()
    return time.perf_counter() - began
