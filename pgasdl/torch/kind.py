"""The interface of the kinds of :func:`pgasdl.torch.attach`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pgasdl.torch.layers import Layer, State
from pgasdl.training.exchange import GradientExchange


class Kind(ABC):
    """A way to make the steps of an optimizer from all ranks' gradients."""

    exchange: GradientExchange
    layers: Sequence[Layer]  # by their number in the exchange

    @abstractmethod
    def place(self) -> None:
        """Move the layers into the exchange's memory."""

    def begin(self, layer: Layer) -> None:
        """Start the exchange of ``layer``."""
        self.exchange._require_no_capture("a gradient exchange")  # before anything is changed
        layer.gather()
        layer.state = State.EXCHANGING
        self.ready(layer)

    def ready(self, layer: Layer) -> None:
        """Let the exchange have the gradients of ``layer``."""
        self.exchange.ready(layer.index)

    def before_use(self, layer: Layer) -> None:  # noqa: B027
        """Refuse to let the program use parameters that peers may write to."""

    def before_step(self) -> None:  # noqa: B027
        """Refuse a step that cannot be made."""

    def stepped(self) -> None:  # noqa: B027
        """Note that from now on every layer has a step to make."""

    @abstractmethod
    def finish(self, layer: Layer) -> None:
        """Wait until the step that ``layer`` has to make is made."""

    @abstractmethod
    def complete(self) -> None:
        """Wait until every exchange is over; no layer has a step to make."""

    def gather_state(self, whole: Any) -> None:  # noqa: B027
        """Put all of the optimizer's state into ``whole``. Collective."""

    def scatter_state(self, whole: Any) -> None:  # noqa: B027
        """Take from the optimizer's state the parts that this rank keeps elsewhere."""

    def close(self, *, finish: bool) -> None:
        """Give the exchange's memory back. ``finish``: first end exchanges that are under way."""
        self.exchange.close(finish=finish)
