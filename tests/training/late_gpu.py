"""A stand-in for a GPU that does everything as late as it may, so that a missing order shows.

Its tensors hold memory of the host and say that they are on ``cuda:0``. What is enqueued on a
stream runs only when somebody waits for it, or for an event behind it; a missing wait shows as
numbers that are not there yet. Pinned memory begins as ``POISON``.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch.futures import Future

POISON = 77
DEVICE = torch.device("cuda", 0)
_lock = threading.RLock()


class LateStream:
    """Runs what it is given in its order, when somebody waits."""

    all: ClassVar[weakref.WeakSet[LateStream]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._queued: deque[Callable[[], Any]] = deque()
        self.enqueued = self.ran = 0
        with _lock:
            self.all.add(self)

    def enqueue(self, call: Callable[[], Any]) -> None:
        with _lock:
            self._queued.append(call)
            self.enqueued += 1

    def wait_event(self, event: LateEvent) -> None:
        self.enqueue(event.synchronize)

    def wait_stream(self, other: LateStream) -> None:
        self.wait_event(LateEvent(other))

    def run(self, until: int) -> None:
        with _lock:
            while self.ran < until:
                call = self._queued.popleft()
                self.ran += 1
                call()


class LateEvent:
    """A place in a stream."""

    def __init__(self, stream: LateStream) -> None:
        self._stream, self._place = stream, stream.enqueued

    def synchronize(self) -> None:
        self._stream.run(self._place)

    def query(self) -> bool:
        """Whether the stream came so far; each look lets it go one step."""
        with _lock:
            if self._stream.ran < self._place:
                self._stream.run(self._stream.ran + 1)
                return False
            return True


class LateFuture(Future):  # type: ignore[type-arg]
    """Orders streams as a future that is made with devices."""

    def set_result(self, result: Any) -> None:
        self.event = LateEvent(gpu.current(DEVICE))
        super().set_result(result)

    def wait(self) -> Any:
        result = super().wait()
        gpu.current(DEVICE).wait_event(self.event)
        return result

    def then(self, callback: Callable[[Any], Any]) -> LateFuture:
        """The callback has a stream of its own, and who waits for it waits for that."""
        made = LateFuture()

        def ordered(_: Any) -> None:
            with gpu.on(LateStream()):
                gpu.current(DEVICE).wait_event(self.event)
                try:
                    made.set_result(callback(self))
                except Exception as error:
                    made.set_exception(error)

        self.add_done_callback(ordered)
        return made


class LateGpu:
    """In place of ``streams.Cuda``."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self.kept: set[int] = set()  # addresses of memory that streams use

    def current(self, device: torch.device) -> LateStream:
        assert device == DEVICE
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = LateStream()
        stream: LateStream = self._of_thread.stream
        return stream

    def stream(self, device: torch.device) -> LateStream:
        return LateStream()

    @contextlib.contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        before = self.current(DEVICE)
        self._of_thread.stream = stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    def event(self, stream: LateStream) -> LateEvent:
        return LateEvent(stream)

    def keep(self, tensor: torch.Tensor, stream: LateStream) -> None:
        self.kept.add(bare(tensor).untyped_storage().data_ptr())

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self._of_thread.captures = True
        yield
        self._of_thread.captures = False

    def captures(self, device: torch.device) -> bool:
        return getattr(self._of_thread, "captures", False)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.full(tensor.shape, POISON, dtype=tensor.dtype)

    def future(self, device: torch.device) -> LateFuture:
        return LateFuture()

    def drain(self, device: torch.device) -> None:
        assert device == DEVICE
        with _lock:
            for stream in list(LateStream.all):
                stream.run(stream.enqueued)


gpu = LateGpu()
_GETTERS = {
    torch.Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__: DEVICE,  # type: ignore[attr-defined]
}


class LateTensor(torch.Tensor):
    """A tensor on the stand-in; what changes it, or copies it, is enqueued."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for getter, value in _GETTERS.items():
            if func == getter:
                return value
        name = func.__name__
        assert name not in ("numpy", "tolist", "item"), f"{name} of memory of a GPU"
        given = [bare(each) for each in args]
        if name.endswith("_") and not name.startswith("__"):
            stream = gpu.current(DEVICE)
            stream.enqueue(lambda: getattr(given[0], name)(*given[1:]))
            on_one_side = sum(isinstance(each, torch.Tensor) for each in args) == 2 and not all(
                isinstance(each, LateTensor) for each in args[:2]
            )
            if name == "copy_" and on_one_side and not (kwargs or {}).get("non_blocking"):
                LateEvent(stream).synchronize()
            return args[0]
        if name == "contiguous" and not given[0].is_contiguous():
            made = on_gpu(torch.empty(given[0].shape, dtype=given[0].dtype))
            return made.copy_(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*given, **(kwargs or {}))
        return out.as_subclass(cls) if isinstance(out, torch.Tensor) else out


def bare(tensor: Any) -> Any:
    """The memory behind a tensor."""
    if not isinstance(tensor, LateTensor):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def on_gpu(tensor: torch.Tensor) -> LateTensor:
    """A copy on the stand-in, which is made when its stream gets there."""
    made = torch.full_like(tensor, POISON).as_subclass(LateTensor)
    given = tensor.clone()
    gpu.current(DEVICE).enqueue(lambda: bare(made).copy_(given))
    return made


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """What the current stream finds in a tensor, when it gets there."""
    if not isinstance(tensor, LateTensor):
        return tensor.clone()
    LateEvent(gpu.current(DEVICE)).synchronize()
    return bare(tensor).clone()
