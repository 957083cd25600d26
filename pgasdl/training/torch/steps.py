"""An optimizer's step for some parameters at a time, with the hyperparameters of its moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from pgasdl.training.torch.layers import Settings


def steps_by_parameter(optimizer: Optimizer) -> bool:
    """Whether it updates each parameter from that parameter's gradient and state alone.

    PyTorch's own do, except LBFGS. Of others nobody knows.
    """
    own = type(optimizer).__module__.startswith("torch.optim.")
    return own and not isinstance(optimizer, LBFGS)


class PartialStep:
    """Makes an optimizer's step for some of its parameters.

    Parameters
    ----------
    optimizer : Optimizer
        With the step that it has now.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._step = optimizer.step
        self._own = optimizer.__dict__.get("step")  # a scheduler's

    def restore(self) -> None:
        """Give the optimizer back the step that it had."""
        if self._own is None:
            del self._optimizer.step
        else:
            self._optimizer.step = self._own  # type: ignore[method-assign]

    def settings(self) -> Settings:
        """Return the hyperparameters of every group, as they are now."""
        return [
            {name: _copied(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]

    def all(self) -> None:
        """Make the step for every parameter."""
        self._step()

    def of(self, parameters: Sequence[nn.Parameter], settings: Settings) -> None:
        """Make the step for ``parameters`` alone."""
        wanted = set(parameters)
        groups = self._optimizer.param_groups
        chosen = []
        for group, values in zip(groups, settings, strict=True):
            some = [parameter for parameter in group["params"] if parameter in wanted]
            if some:
                chosen.append({**values, "params": some})
        self._optimizer.param_groups = chosen
        try:
            self._step()
        finally:
            self._optimizer.param_groups = groups


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
