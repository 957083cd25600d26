"""Before which module's forward a layer's step has to be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pgasdl.training.torch.layers import Layer


class ForwardHooks:
    """Hooks before every module; after the first step, before those that use a layer.

    Parameters
    ----------
    model : nn.Module
        The model.
    layers : Sequence[Layer]
        Its layers.
    use : Callable[[Layer], None]
        Called with each layer that a module uses, before the module's forward.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], use: Callable[[Layer], None]
    ) -> None:
        self._model, self._layers, self._use = model, layers, use
        self._called: set[nn.Module] | None = set()  # until the first step
        self._used_by: dict[nn.Module, list[Layer]] = {}
        for layer in layers:
            for module in layer.modules:
                self._used_by.setdefault(module, []).append(layer)
        # Not traced by torch.compile.
        before = torch.compiler.disable(self._before)  # type: ignore[no-untyped-call]
        self._hooks: dict[nn.Module, RemovableHandle] = {
            module: module.register_forward_pre_hook(before) for module in model.modules()
        }

    def _before(self, module: nn.Module, _: Any) -> None:
        if self._called is not None:
            self._called.add(module)
        for layer in self._used_by.get(module, ()):
            self._use(layer)

    def learn(self) -> list[Layer]:
        """Find the users of layers whose own modules nobody called, in the first step.

        A parent may use a child's parameters without calling it (nn.MultiheadAttention does). Then
        the nearest module around it that was called stands for it.

        Returns
        -------
        list[Layer]
            Those that no module stands for; empty in later steps.
        """
        if self._called is None:
            return []
        called, self._called = self._called, None
        alone = []
        for layer in self._layers:
            if called.isdisjoint(layer.modules):
                user = next((each for each in self._around(layer) if each in called), None)
                if user is None:
                    alone.append(layer)
                else:
                    self._used_by.setdefault(user, []).append(layer)
        for module in self._hooks.keys() - self._used_by.keys():
            self._hooks.pop(module).remove()
        return alone

    def _around(self, layer: Layer) -> Iterator[nn.Module]:
        """Yield the modules around a layer's, nearest first."""
        place = layer.name
        while place:
            place = place.rpartition(".")[0]
            yield self._model.get_submodule(place)

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
