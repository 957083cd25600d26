"""Kind "average": every rank gets the mean gradient, and makes every step itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pgasdl.context import Context
from pgasdl.torch.kind import Kind
from pgasdl.torch.layers import Layer, State
from pgasdl.torch.steps import PartialStep
from pgasdl.training.exchange import GradientExchange


class Average(Kind):
    """Averages gradients; the marks travel behind them. ``options``: GradientExchange's."""

    def __init__(
        self, layers: Sequence[Layer], step: PartialStep, context: Context, **options: Any
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

    def finish(self, layer: Layer) -> None:
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

    def _average(self, layer: Layer) -> None:
        if layer.state is State.EXCHANGING:
            layer.require_unchanged()
            self.exchange.wait(layer.index)
            layer.arrive()
