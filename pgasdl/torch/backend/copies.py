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

from pgasdl.torch import streams
from pgasdl.torch.backend.arguments import contiguous
from pgasdl.torch.work import Result


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
        streams.require_no_capture(device, "a call of torch.distributed")
        self._device, self._stream = device, stream or streams.cuda.stream(device)
        self._stream.wait_stream(streams.cuda.current(device))
        self._results: list[tuple[Tensor, Tensor]] = []
        self._there: Any = None  # events
        self._back: Any = None
        self._lock = threading.Lock()

    def make(self, tensor: Tensor, *, reads: bool, writes: bool) -> Tensor:
        """Return memory on the host that gets what a tensor has, or gives it what it will have."""
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
        """Note that all are made."""
        self._there = streams.cuda.event(self._stream)

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
                self._back = streams.cuda.event(self._stream)
            return self._back

    def wait_here(self) -> None:
        """Let the current stream wait until they are back."""
        streams.cuda.current(self._device).wait_event(self.bring_back())

    def future(self) -> Future[Result]:
        """Return a future that orders streams of their device."""
        return streams.cuda.future(self._device)

    def on_stream(self) -> Any:
        """Return a context in which PyTorch enqueues on their stream."""
        return streams.cuda.on(self._stream)
