"""Hooks of a training loop's calls: forward, backward, step, zero_grad, the optimizer's state.

Copies and pickles of the model or the optimizer contain none of them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pgasdl.errors import ConfigError
from pgasdl.torch.attachment.layers import ATTACHED, ModelLayer
from pgasdl.torch.untraced import untraced

_OWN = "_pgasdl_hook"  # marks hooks of modules
_ZEROING = "_pgasdl_zeroing"  # of a model: what its attachments' zero_grad do


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The functions that the hooks call."""

    before_gradient: Callable[[ModelLayer, int, Tensor], None]  # backward will add to a gradient
    have_gradient: Callable[[ModelLayer, int, Tensor], None]  # backward has added to it
    use: Callable[[ModelLayer], None]  # a module that holds parameters of the layer will run
    step: Callable[[Callable[[], Any] | None], Any]  # instead of the method of this name
    zero_grad: Callable[[bool], None]  # likewise
    before_state: Callable[[bool], None]  # the optimizer's state will be saved (True) or loaded
    after_state: Callable[[], None]  # it was saved or loaded


class LoopHooks:
    """Hooks of model, optimizer and parameters, until :meth:`remove`; they call ``calls``."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, layers: Sequence[ModelLayer], calls: Callbacks
    ) -> None:
        self._model, self._optimizer, self._layers, self._calls = model, optimizer, layers, calls
        self._hooks: list[RemovableHandle] = []
        for layer in layers:
            for number, parameter in enumerate(layer.parameters):
                ATTACHED[parameter] = True
                before = partial(calls.before_gradient, layer, number)
                behind = partial(calls.have_gradient, layer, number)
                self._hooks += (
                    parameter.register_hook(before),  # type: ignore[no-untyped-call]
                    parameter.register_post_accumulate_grad_hook(behind),  # type: ignore[no-untyped-call]
                )
        self._used_by: dict[nn.Module, list[ModelLayer]] = {}
        for layer in layers:
            for module in layer.modules:
                self._used_by.setdefault(module, []).append(layer)
        # Attention uses its child without calling it; torch.compile should not see the hook there.
        for attention in model.modules():
            if isinstance(attention, nn.MultiheadAttention):
                inner = self._used_by.get(attention.out_proj, [])
                self._used_by.setdefault(attention, []).extend(inner)
        self._hook_modules()
        self._hook_model()
        self._hook_optimizer()

    def _hook_modules(self) -> None:
        """Make steps that are due before a module's other hooks look at its weights."""

        @untraced
        def before(module: nn.Module, _: Any) -> None:
            for layer in self._used_by[module]:
                self._calls.use(layer)

        setattr(before, _OWN, True)
        for module in self._used_by:
            self._hooks.append(module.register_forward_pre_hook(before, prepend=True))
            _let_copy(module)

    def _hook_model(self) -> None:
        own = self._model.__dict__
        own.setdefault(_ZEROING, []).append(self._calls.zero_grad)
        own["zero_grad"] = types.MethodType(_zero_grad, self._model)
        _let_copy(self._model)

    def _hook_optimizer(self) -> None:
        optimizer, calls = self._optimizer, self._calls
        for before, saving in (
            (optimizer.register_state_dict_pre_hook, True),
            (optimizer.register_load_state_dict_pre_hook, False),
        ):
            self._hooks.append(before(lambda *_, saving=saving: calls.before_state(saving)))
        for behind in (
            optimizer.register_state_dict_post_hook,
            optimizer.register_load_state_dict_post_hook,
        ):
            self._hooks.append(behind(lambda *_: calls.after_state()))

        # A compiled function may call them.
        @untraced
        def zero_grad(owner: Optimizer, set_to_none: bool = True) -> None:
            calls.zero_grad(set_to_none)
            type(owner).zero_grad(owner, set_to_none)  # of parameters that are not attached

        @untraced
        def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return calls.step(closure)

        # A scheduler wraps a step that it has not wrapped yet, by the method's function.
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        for method in (zero_grad, step):
            setattr(optimizer, method.__name__, types.MethodType(method, optimizer))

    def remove(self) -> None:
        """Remove all hooks but the optimizer's step, which may have been replaced before."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            for parameter in layer.parameters:
                del ATTACHED[parameter]
        del self._optimizer.zero_grad
        zeroing = self._model.__dict__[_ZEROING]
        zeroing.remove(self._calls.zero_grad)
        if not zeroing:
            del self._model.__dict__[_ZEROING], self._model.zero_grad
        for module in (self._model, *self._used_by):
            hooks = module._forward_pre_hooks.values()
            if _ZEROING not in module.__dict__ and not any(hasattr(each, _OWN) for each in hooks):
                for name in _COPYING:
                    module.__dict__.pop(name, None)


def _zero_grad(model: nn.Module, set_to_none: bool = True) -> None:
    for zero_grad in model.__dict__[_ZEROING]:
        zero_grad(set_to_none)
    type(model).zero_grad(model, set_to_none)  # of parameters that are not attached


def _let_copy(module: nn.Module) -> None:
    for name, method in _COPYING.items():
        module.__dict__[name] = types.MethodType(method, module)


def _refuse_script(module: nn.Module) -> Any:
    raise ConfigError(
        f"torch.jit.script({type(module).__name__}): scripted code would use an attached model's "
        "parameters without telling: script a copy.deepcopy() of it, or use torch.compile"
    )


def _state_without_hooks(module: nn.Module) -> Any:
    """Return the state of a copy or pickle of ``module``: its own, without these hooks."""
    own: Any = type(module)
    state = dict(own.__getstate__(module))
    if _ZEROING in state:
        del state[_ZEROING], state["zero_grad"]
    for name in _COPYING:
        del state[name]
    hooks = state["_forward_pre_hooks"]
    kept = {key: hook for key, hook in hooks.items() if not hasattr(hook, _OWN)}
    state["_forward_pre_hooks"] = type(hooks)(kept)
    return state


_COPYING = {"__getstate__": _state_without_hooks, "__prepare_scriptable__": _refuse_script}
