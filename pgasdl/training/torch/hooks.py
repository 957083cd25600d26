"""Hooks of what a training loop calls: backward, step, zero_grad, state_dict."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pgasdl.training.torch.layers import Layer


@dataclass(frozen=True, slots=True)
class Calls:
    """What the hooks call.

    Attributes
    ----------
    before_gradient, have_gradient : Callable[[Layer, int, Tensor], None]
        Backward is about to add to a parameter's gradient; it has added.
    step, zero_grad : Callable
        For the method of this name.
    before_state : Callable[[object, bool], None]
        State of an optimizer or model is about to be saved (True) or loaded.
    after_state : Callable[[object], None]
        An optimizer's state was saved or loaded.
    """

    before_gradient: Callable[[Layer, int, Tensor], None]
    have_gradient: Callable[[Layer, int, Tensor], None]
    step: Callable[[Callable[[], Any] | None], None]
    zero_grad: Callable[[bool], None]
    before_state: Callable[[object, bool], None]
    after_state: Callable[[object], None]


class LoopHooks:
    """Hooks of model, optimizer and parameters, until :meth:`remove`.

    Parameters
    ----------
    model : nn.Module
        The model.
    optimizer : Optimizer
        Its optimizer.
    layers : Sequence[Layer]
        Their layers.
    calls : Calls
        What they call.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, layers: Sequence[Layer], calls: Calls
    ) -> None:
        self._model, self._optimizer, self._layers = model, optimizer, layers
        self._hooks: list[RemovableHandle] = []
        for layer in layers:
            for number, parameter in enumerate(layer.parameters):
                parameter._pgasdl_attached = True  # type: ignore[attr-defined]
                before = partial(calls.before_gradient, layer, number)
                behind = partial(calls.have_gradient, layer, number)
                self._hooks += (
                    parameter.register_hook(before),  # type: ignore[no-untyped-call]
                    parameter.register_post_accumulate_grad_hook(behind),  # type: ignore[no-untyped-call]
                )
        self._hook_states(calls)
        self._replace_methods(calls)

    def _hook_states(self, calls: Calls) -> None:
        # A copy of model or optimizer has these, too, and is not attached.
        def before_saving(owner: object, *_: Any) -> None:
            calls.before_state(owner, True)

        def before_loading(owner: object, *_: Any) -> None:
            calls.before_state(owner, False)

        def behind(owner: object, *_: Any) -> None:
            calls.after_state(owner)

        for each in (self._model, self._optimizer):
            self._hooks.append(each.register_state_dict_pre_hook(before_saving))
            self._hooks.append(each.register_load_state_dict_pre_hook(before_loading))
        self._hooks.append(self._optimizer.register_state_dict_post_hook(behind))
        self._hooks.append(self._optimizer.register_load_state_dict_post_hook(behind))

    def _replace_methods(self, calls: Calls) -> None:
        model, optimizer = self._model, self._optimizer

        def zero_grad(owner: Any, set_to_none: bool = True) -> None:
            if owner is model or owner is optimizer:
                calls.zero_grad(set_to_none)
            else:
                type(owner).zero_grad(owner, set_to_none)

        def step(owner: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if owner is optimizer:
                return calls.step(closure)
            return type(owner).step(owner, closure)

        for each in (model, optimizer):
            each.zero_grad = types.MethodType(zero_grad, each)  # type: ignore[method-assign]
        # A scheduler wraps a step that it has not wrapped yet, by the method's function.
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Remove them, but for the optimizer's step, which had one before perhaps."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            for parameter in layer.parameters:
                del parameter._pgasdl_attached  # type: ignore[attr-defined]
        del self._model.zero_grad, self._optimizer.zero_grad
