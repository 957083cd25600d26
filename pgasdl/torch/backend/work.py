"""The objects that calls of torch.distributed return, of messages and of several calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.futures import Future

from pgasdl.torch.backend.message import Message
from pgasdl.torch.backend.messages import Messages
from pgasdl.torch.work import GroupWork, Result, seconds_of, torch_errors


class MessageWork(GroupWork):
    """A message that was begun; ``seconds`` limit a wait, by default.

    ``completes`` completes its future in a thread where callbacks block nothing else.
    """

    def __init__(
        self,
        result: Result,
        messages: Messages,
        message: Message,
        seconds: float,
        completes: Callable[[GroupWork], None],
    ) -> None:
        super().__init__(result)
        self._messages, self._message, self._seconds = messages, message, seconds
        self._completes = completes
        messages.when_over(message, self._over)

    def _over(self) -> None:
        if self.end(self._message.error):
            self._completes(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait; raise what made it fail."""
        with torch_errors():
            self._messages.wait(self._message, seconds_of(timeout, self._seconds))
        return super().wait(timeout)

    def source_rank(self) -> int:
        """Return who sent it, as a place in the group."""
        self.wait()
        assert self._message.peer is not None
        return self._message.peer

    _source_rank = source_rank


class Together(GroupWork):
    """Several of them, as one."""

    def __init__(self, works: list[GroupWork]) -> None:
        super().__init__([tensor for work in works for tensor in work._result])
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all; raise what made the first one fail."""
        limit = seconds_of(timeout, 0.0)
        deadline = time.monotonic() + limit
        for work in self._works:
            left = max(1e-6, deadline - time.monotonic())  # none is no limit
            work.wait(timedelta(seconds=left) if limit else None)
        return True

    def is_completed(self) -> bool:
        """Whether all are over."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all are over and did not fail."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return what made the first one fail."""
        errors = (work.exception() for work in self._works)
        return next((error for error in errors if error is not None), None)

    def get_future(self) -> Future[Result]:
        """Return a future of the results' tensors."""
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(lambda all_of: [t for each in all_of.value() for t in each.value()])
