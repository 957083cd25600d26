"""CUDA's streams as this package orders its calls on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from pgasdl.errors import UnavailableError


class Cuda:
    """What this package needs of CUDA's streams. Tests have another one."""

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
        """Return a future that orders streams: who waits for it lets the current one wait."""
        return Future(devices=[device])


cuda = Cuda()


def require_no_capture(device: torch.device, what: str) -> None:
    """Raise UnavailableError if the current stream is captured into a graph."""
    if cuda.captures(device):
        raise UnavailableError(
            f"{what} cannot be captured into a CUDA graph, as the host has a part in it: make it "
            "outside of the capture"
        )
