"""An optimizer while a model is attached: its step for some parameters at a time, and its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from pgasdl.torch.attachment import modes
from pgasdl.torch.attachment.layers import Settings


def steps_by_parameter(optimizer: Optimizer) -> bool:
    """Whether it updates each parameter from that parameter's gradient and state alone.

    PyTorch's own do, except LBFGS; of other optimizers it is not known.
    """
    own = type(optimizer).__module__.startswith("torch.optim.")
    return own and not isinstance(optimizer, LBFGS)


def has_step_hooks(optimizer: Any) -> bool:
    """Whether a step calls functions of the program, which may look at every parameter."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))


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


class OptimizerState:
    """Stands in for ``optimizer.state`` from :meth:`adopt` on; copies of it are plain states.

    ``kept`` is the state itself, which a step that is due puts back into the optimizer while it
    runs. ``away``: ``fetch`` has to bring ``kept`` up to date before a look.
    """

    def __init__(self, optimizer: Optimizer, fetch: Callable[[], None]) -> None:
        self._optimizer: Any = optimizer
        self._fetch = fetch
        self.kept: Any = optimizer.state
        self.away = False

    def adopt(self) -> None:
        """Take the place of ``optimizer.state``, also of one that the program has set since."""
        if self._optimizer.state is not self:
            self.kept, self.away = self._optimizer.state, False
            self._optimizer.state = self

    def bring_back(self) -> None:
        """Bring ``kept`` up to date, unless the program has set another state."""
        if self._optimizer.state is self:
            self._look()

    def release(self) -> None:
        """Leave ``kept`` to the optimizer."""
        self.away = False
        if self._optimizer.state is self:
            self._optimizer.state = self.kept

    def _look(self) -> Any:
        if self.away:
            self._fetch()
            self.away = False
        return self.kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._look(), name)


def _asked(name: str) -> Callable[..., Any]:
    """Return the state's method of this name; Python does not ask __getattr__ for these."""

    def method(self: OptimizerState, *given: Any) -> Any:
        return getattr(self._look(), name)(*given)

    return method


for _name in ("__contains__", "__copy__", "__delitem__", "__eq__", "__getitem__", "__ior__",
              "__iter__", "__len__", "__or__", "__reduce__", "__repr__", "__reversed__", "__ror__",
              "__setitem__"):  # fmt: skip
    setattr(OptimizerState, _name, _asked(_name))
MutableMapping.register(OptimizerState)
