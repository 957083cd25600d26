"""An optimizer's state while a model is attached: a look at it waits for the steps that are due."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from torch.optim import Optimizer


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
