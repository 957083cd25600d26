"""Copies of GPU tensors in pinned host memory, and the order of the copies there and back.

A call has a stream of its own:

- It waits for the program's current stream when the call comes. So it copies values that the
  program computed before, and writes to results that no earlier work still reads.
- The host waits for these copies before it looks at them.
- It copies results back once the host is done, and an event follows. A stream that waits for that
  event waits for the first copies, too: later work of the program may read results, and may write
  to the tensors that it gave.
- PyTorch reuses a tensor's memory only after this stream's work with it, and pinned memory only
  after the copies from and to it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from pgasdl.torch import streams
from pgasdl.torch.backend.arguments import contiguous
from pgasdl.torch.work import Result


class HostCopies:
    """The host copies of one call's tensors, all on ``device``; ``stream`` None: a new stream.

    A captured current stream raises UnavailableError: a graph would repeat only the GPU's part.
    """

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        streams.require_no_capture(device, "a call of torch.distributed")
        self._device, self._stream = device, stream or streams.cuda.stream(device)
        self._stream.wait_stream(streams.cuda.current(device))
        self._results: list[tuple[Tensor, Tensor]] = []
        self._there: Any = None  # events
        self._back: Any = None
        self._lock = threading.Lock()

    def make(self, tensor: Tensor, *, reads: bool, writes: bool) -> Tensor:
        """Return host memory that receives the tensor's content, or that provides its result."""
        copy = streams.cuda.pinned(tensor)
        streams.cuda.keep(tensor, self._stream)
        if reads:
            with self.on_stream():  # conj() would be resolved on the host, without waiting
                copy.copy_(contiguous(tensor), non_blocking=True)
        if writes:
            self._results.append((tensor, copy))
        return copy

    def keep(self, tensor: Tensor) -> None:
        """Note that the stream uses a tensor as it is, without a copy."""
        streams.cuda.keep(tensor, self._stream)

    def begin(self) -> None:
        """Note that all copies are made."""
        self._there = streams.cuda.event(self._stream)

    def arrive(self) -> None:
        """Wait until the host may read the copies."""
        self._there.synchronize()

    def bring_back(self) -> Any:
        """Enqueue the copies back, at the first call; return the event after them."""
        with self._lock:
            if self._back is None:
                read_only = any(tensor.is_inference() for tensor, _ in self._results)
                with self.on_stream(), torch.inference_mode(read_only):  # they are so elsewhere
                    for tensor, copy in self._results:
                        tensor.copy_(copy, non_blocking=True)
                self._back = streams.cuda.event(self._stream)
            return self._back

    def wait_here(self) -> None:
        """Let the current stream wait until the results are back."""
        streams.cuda.current(self._device).wait_event(self.bring_back())

    def future(self) -> Future[Result]:
        """Return a future that orders streams of their device."""
        return streams.cuda.future(self._device)

    def on_stream(self) -> Any:
        """Return a context in which PyTorch enqueues on their stream."""
        return streams.cuda.on(self._stream)
