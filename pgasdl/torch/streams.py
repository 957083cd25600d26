"""CUDA's streams, and the order of this package's calls on them."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from pgasdl.errors import PgasTimeoutError, UnavailableError


class Cuda:
    """The part of CUDA's streams that this package needs. Tests replace it."""

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

    def future(self, device: torch.device) -> Future[Any]:
        """Return a future that orders streams: a wait for it lets the current stream wait."""
        return Future(devices=[device])

    def drain(self, device: torch.device) -> None:
        """Wait for all streams of a device."""
        torch.cuda.synchronize(device)


cuda = Cuda()


def require_no_capture(device: torch.device, what: str) -> None:
    """Raise UnavailableError if the current stream is captured into a graph."""
    if cuda.captures(device):
        raise UnavailableError(
            f"{what} cannot be captured into a CUDA graph, as the host has a part in it: make it "
            "outside of the capture"
        )


class Enqueued:
    """The work on streams of a GPU that has to be done before peers may be signalled."""

    _PAUSE = 1e-4  # seconds between looks, at most

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._last: dict[Any, Any] = {}  # the last event of each stream

    def note(self) -> Any:
        """Return an event behind all that the current stream has; :meth:`finish` waits for it."""
        stream = cuda.current(self.device)
        event = self._last[stream] = cuda.event(stream)
        return event

    def finish(self, seconds: float) -> None:
        """Wait until the current stream has done all its work, and other streams the noted work.

        UnavailableError: the current stream is captured into a graph.
        """
        require_no_capture(self.device, "a signal about memory on a GPU")
        self.note()
        deadline = time.monotonic() + seconds
        for event in list(self._last.values()):
            pause = 0.0
            while not event.query():
                if time.monotonic() >= deadline:
                    raise PgasTimeoutError(
                        f"a stream of {self.device} has not done what was enqueued within "
                        f"{seconds:g} s; peers were told nothing"
                    )
                time.sleep(pause)  # the first time it only lets other threads run
                pause = min(self._PAUSE, pause + self._PAUSE / 10)
