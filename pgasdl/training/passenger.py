"""Passengers: a few elements that travel with a layer, and need no message of their own."""

from __future__ import annotations

from typing import Any, Protocol


class Passenger(Protocol):
    """Made by :func:`pgasdl.jobs.connect`."""

    @property
    def elements(self) -> int:
        """How many elements it needs; the same on all ranks."""
        ...

    def give(self, element: Any) -> None:
        """Put them into a layer, before its exchange."""
        ...

    def take(self, element: Any) -> None:
        """Read the mean of all ranks', after the exchange."""
        ...
