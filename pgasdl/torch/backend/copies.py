"""Copies in pinned host memory of tensors on a GPU, and the orders of their ways there and back.

A call has a stream of its own:

- It waits for the program's current stream when the call comes. So it copies what the program
  computed before, and writes to results that nothing enqueued before still reads.
- The host waits for these copies before it looks at them.
- It copies results back once the host is done, and an event follows. A stream that waits for that
  event waits for the first copies, too: what the program enqueues behind it may read results, and
  may write to what it gave.
- PyTorch gives a tensor's memory to others only after what the stream does with it, and pinned
  memory only after the copies from and to it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from pgasdl.errors import UnavailableError
from pgasdl.torch.backend.arguments import contiguous
from pgasdl.torch.backend.work import Result


class Cuda:
    """What calls need of CUDA. Tests have another one."""

    def current(self, device: torch.device) -> Any:
        """Return the stream on which the program enqueues."""
        return torch.cuda.current_stream(device)

    def stream(self, device: torch.device) -> Any:
        """Return a stream for one call, of PyTorch's pool."""
        return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> Any:
        """Return a context in which PyTorch enqueues on ``stream``."""
        return torch.cuda.stream(stream)

    def event(self, stream: Any) -> Any:
        """Return an event behind all that was enqueued on ``stream``."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiting is sleep
        event.record(stream)
        return event

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Give a tensor's memory to others only after what ``stream`` has then."""
        tensor.record_stream(stream)

    def captures(self, device: torch.device) -> bool:
        """Whether the current stream is captured into a graph."""
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def pinned(self, tensor: Tensor) -> Tensor:
        """Return pinned host memory for the numbers of a tensor."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)

    def future(self, device: torch.device) -> Future[Result]:
        """Return a future that orders streams: who waits for it lets the current one wait."""
        return Future(devices=[device])


cuda = Cuda()


class Copies:
    """The copies of one call's tensors, and their ways there and back.

    Parameters
    ----------
    device : torch.device
        Where all of them are.
    stream : stream, optional
        Theirs; None: one of their own.

    Raises
    ------
    UnavailableError
        The current stream is captured into a graph.
    """

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        if cuda.captures(device):
            raise UnavailableError(
                "a call of torch.distributed cannot be captured into a CUDA graph, as the host has "
                "a part in it: make it outside of the capture"
            )
        self._device, self._stream = device, stream or cuda.stream(device)
        self._stream.wait_stream(cuda.current(device))
        self._results: list[tuple[Tensor, Tensor]] = []
        self._there: Any = None  # events
        self._back: Any = None
        self._lock = threading.Lock()

    def make(self, tensor: Tensor, *, reads: bool, writes: bool) -> Tensor:
        """Return memory on the host that gets what a tensor has, or gives it what it will have."""
        copy = cuda.pinned(tensor)
        cuda.keep(tensor, self._stream)
        if reads:
            with self.on_stream():  # conj() would be resolved on the host, without waiting
                copy.copy_(contiguous(tensor), non_blocking=True)
        if writes:
            self._results.append((tensor, copy))
        return copy

    def keep(self, tensor: Tensor) -> None:
        """Note that the stream uses a tensor as it is, without a copy."""
        cuda.keep(tensor, self._stream)

    def begin(self) -> None:
        """Note that all are made."""
        self._there = cuda.event(self._stream)

    def arrive(self) -> None:
        """Wait until the host may look at them."""
        self._there.synchronize()

    def bring_back(self) -> Any:
        """Enqueue their way back, the first time; return the event behind it."""
        with self._lock:
            if self._back is None:
                read_only = any(tensor.is_inference() for tensor, _ in self._results)
                with self.on_stream(), torch.inference_mode(read_only):  # they are so elsewhere
                    for tensor, copy in self._results:
                        tensor.copy_(copy, non_blocking=True)
                self._back = cuda.event(self._stream)
            return self._back

    def wait_here(self) -> None:
        """Let the current stream wait until they are back."""
        cuda.current(self._device).wait_event(self.bring_back())

    def future(self) -> Future[Result]:
        """Return a future that orders streams of their device."""
        return cuda.future(self._device)

    def on_stream(self) -> Any:
        """Return a context in which PyTorch enqueues on their stream."""
        return cuda.on(self._stream)
