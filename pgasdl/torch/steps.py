"""An optimizer's step for some parameters at a time, with the hyperparameters of its moment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from pgasdl.torch import modes
from pgasdl.torch.layers import Settings


def steps_by_parameter(optimizer: Optimizer) -> bool:
    """Whether it updates each parameter from that parameter's gradient and state alone.

    PyTorch's own do, except LBFGS; of other optimizers it is not known.
    """
    own = type(optimizer).__module__.startswith("torch.optim.")
    return own and not isinstance(optimizer, LBFGS)


class PartialStep:
    """Makes an optimizer's step, as it is now, for some of its parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._step = optimizer.step
        self._own = optimizer.__dict__.get("step")  # a scheduler's
        self._group_of: dict[nn.Parameter, int] = {}
        self._state: Any = None
        self._modes = modes.noted()

    def restore(self) -> None:
        """Give the optimizer back the step that it had."""
        if self._own is None:
            del self._optimizer.step
        else:
            self._optimizer.step = self._own  # type: ignore[method-assign]

    def settings(self, state: Any) -> Settings:
        """Return the hyperparameters of every group, as they are now.

        Note each parameter's group, PyTorch's modes, and the ``state`` with which :meth:`of` makes
        this step.
        """
        self._state, self._modes = state, modes.noted()
        groups = self._optimizer.param_groups
        self._group_of = {each: n for n, group in enumerate(groups) for each in group["params"]}
        return [
            {name: _copied(value) for name, value in group.items() if name != "params"}
            for group in groups
        ]

    def all(self) -> None:
        """Make the step for every parameter."""
        self._step()

    def of(self, parameters: Sequence[nn.Parameter], settings: Settings) -> None:
        """Make the step for ``parameters`` alone."""
        pairs = ((each, each) for each in parameters)
        self.of_parts(pairs, settings, self._state)

    def of_parts(
        self,
        pairs: Iterable[tuple[nn.Parameter, nn.Parameter]],
        settings: Settings,
        state: Any,
    ) -> None:
        """Make the step for parts of parameters, with their ``state``.

        ``pairs`` : parameter and part; without those that were in no group at :meth:`settings`
        """
        groups: list[list[nn.Parameter]] = [[] for _ in settings]
        for parameter, part in pairs:
            number = self._group_of.get(parameter)
            if number is not None:
                groups[number].append(part)
        optimizer = self._optimizer
        whole = optimizer.param_groups, optimizer.state
        optimizer.param_groups = [
            {**values, "params": some}
            for some, values in zip(groups, settings, strict=True)
            if some
        ]
        optimizer.state = state
        try:
            with modes.as_noted(self._modes):
                self._step()
        finally:
            optimizer.param_groups, optimizer.state = whole


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
