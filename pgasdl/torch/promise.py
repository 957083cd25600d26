"""Futures whose failure C++ notices, too."""

from __future__ import annotations

from typing import Any

from torch.futures import Future


class Promise:
    """The end of a call that a program sees as a future.

    C++ takes what ``Future.set_exception`` sets for the value: DistributedDataParallel then looks
    for tensors in an exception, and crashes. If a callback raises, C++ and Python both get an
    error. So ``future``, which the program gets, is made by a callback of ``ended``; a wait for a
    failed one raises a RuntimeError that says why.
    """

    def __init__(self, ended: Future[Any]) -> None:
        self._ended = ended
        self.future: Future[Any] = ended.then(_value_of)

    def settle(self, value: Any) -> None:
        """Complete the future; with an exception: let it fail. That runs its callbacks."""
        self._ended.set_result(value)


def _value_of(ended: Future[Any]) -> Any:
    value = ended.value()
    if isinstance(value, BaseException):
        raise value
    return value
