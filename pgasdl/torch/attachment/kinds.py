"""The kinds of :func:`pgasdl.torch.attach`: their interface, and kind "average".

In that, every rank gets the mean gradient, and makes every step itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pgasdl.context import Context
from pgasdl.torch.attachment.layers import ModelLayer, State
from pgasdl.torch.attachment.optimizer import PartialStep
from pgasdl.training.exchange import GradientExchange


class Kind(ABC):
    """A way to make the steps of an optimizer from all ranks' gradients."""

    exchange: GradientExchange
    layers: Sequence[ModelLayer]  # by their number in the exchange

    @abstractmethod
    def place(self) -> None:
        """Move the layers into the exchange's memory."""

    def begin(self, layer: ModelLayer) -> None:
        """Start the exchange of ``layer``."""
        self.exchange._require_no_capture("a gradient exchange")  # before anything is changed
        layer.gather()
        layer.state = State.EXCHANGING
        self.ready(layer)

    def ready(self, layer: ModelLayer) -> None:
        """Let the exchange have the gradients of ``layer``."""
        self.exchange.ready(layer.index)

    def before_use(self, layer: ModelLayer) -> None:  # noqa: B027
        """Refuse to let the program use parameters that peers may write to."""

    def before_step(self, layers: Sequence[ModelLayer]) -> None:  # noqa: B027
        """Refuse a step of these layers that cannot be made."""

    def stepped(self) -> None:  # noqa: B027
        """Note that from now on every layer has a step to make."""

    @abstractmethod
    def finish(self, layer: ModelLayer) -> None:
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


class Average(Kind):
    """Averages gradients; the marks travel behind them. ``options``: GradientExchange's."""

    def __init__(
        self, layers: Sequence[ModelLayer], step: PartialStep, context: Context, **options: Any
    ) -> None:
        self.layers, self._step = layers, step
        self.exchange = GradientExchange(
            context,
            [((layer.count + layer.behind,), layer.dtype) for layer in layers],
            device=layers[0].device,
            **options,
        )

    def place(self) -> None:
        """Move the layers' gradients."""
        for layer in self.layers:
            where = self.exchange.layers[layer.index]
            memory = self.exchange.gradients.torch(layer.dtype, where.at, where.count)
            layer.place(*memory.split([layer.count, layer.behind]))

    def finish(self, layer: ModelLayer) -> None:
        """Make the step of ``layer``."""
        self._average(layer)
        layer.release_parameters()
        assert layer.step is not None
        with layer.lend_gradients() as parameters:
            if parameters:
                self._step.of(parameters, layer.step)
        layer.state = State.LOCAL

    def complete(self) -> None:
        """Wait for every mean gradient."""
        for layer in self.layers:
            self._average(layer)

    def step_at_once(self) -> None:
        """Make the optimizer's step as a whole, with the mean gradients."""
        self.complete()
        self._step.all()
        for layer in self.layers:
            layer.state = State.LOCAL

    def _average(self, layer: ModelLayer) -> None:
        if layer.state is State.EXCHANGING:
            layer.require_unchanged()
            self.exchange.wait(layer.index)
            layer.arrive()
