"""A model's parameters as layers of an exchange: those that one module holds travel together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from pgasdl.buffers import as_numpy_dtype, native_dtype
from pgasdl.errors import BufferRefusedError, ConfigError, PlanError
from pgasdl.torch.attachment import modes
from pgasdl.torch.attachment.guards import guard, release, tell_gradient
from pgasdl.training.passenger import Passenger

Settings = list[dict[str, Any]]
ATTACHED = WeakIdKeyDictionary()  # the parameters of all attached models


class State(Enum):
    """The content of a layer's gradient: whose it is, or what it was used for."""

    LOCAL = "this rank's"
    EXCHANGING = "under way"
    AVERAGED = "the mean of all ranks"
    SPENT = "what the owners' last step was made of"


@dataclass(eq=False, slots=True)
class ModelLayer:
    """Parameters of one dtype that one module holds."""

    index: int  # in the exchange
    name: str  # place in the model of the first module that holds it; "" is the model
    parameters: list[nn.Parameter] = field(default_factory=list)  # in the module's order
    names: list[str] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)  # all that hold one of the parameters
    gradient: Tensor = field(default_factory=lambda: torch.empty(0))  # all parameters', flat
    # One element for each parameter; after the exchange above 0 if any rank has its gradient.
    marks: Tensor = field(default_factory=lambda: torch.empty(0))
    passenger: Passenger | None = None  # travels behind the marks
    seat: Tensor = field(default_factory=lambda: torch.empty(0))  # the passenger's elements
    views: list[Tensor] = field(default_factory=list)  # each parameter's part of ``gradient``
    places: list[int] = field(default_factory=list)  # address of each view
    homes: list[int] = field(default_factory=list)  # of each parameter moved into an exchange
    arrived: set[int] = field(default_factory=set)  # parameters that this backward has reached
    state: State = State.LOCAL
    version: int = 0  # PyTorch's count of changes of ``gradient`` when its exchange began
    step: Settings | None = None  # an optimizer step that the layer still has to make
    weight_versions: list[int] = field(default_factory=list)  # PyTorch's counts, at that step
    has: list[bool] = field(default_factory=list)  # gradients of this rank, when the exchange began

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all its parameters."""
        return self.parameters[0].dtype

    @property
    def count(self) -> int:
        """Number of elements of all its parameters."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def behind(self) -> int:
        """Number of elements that travel behind the gradient: the marks and the passenger's."""
        return len(self.parameters) + (self.passenger.elements if self.passenger else 0)

    def place(self, gradient: Tensor, behind: Tensor) -> None:
        """Let every parameter's gradient be a view of ``gradient``, laid out as the parameter."""
        n_marks = len(self.parameters)
        self.gradient, self.marks, self.seat = gradient, behind[:n_marks], behind[n_marks:]
        self.views = self._cut(gradient)
        self.places = [view.data_ptr() for view in self.views]
        self.clear()

    def move(self, weights: Tensor) -> None:
        """Let every parameter be a view of ``weights``, with the values that it has."""
        for parameter, view in zip(self.parameters, self._cut(weights), strict=True):
            view.copy_(parameter.data)
            parameter.data = view
            self.homes.append(view.data_ptr())

    def _cut(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [parameter.numel() for parameter in self.parameters])
        return [shaped(part, each) for part, each in zip(parts, self.parameters, strict=True)]

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return self.parameters[0].device

    def reached(self) -> list[bool]:
        """Return for each parameter whether any rank had its gradient; after the exchange."""
        with self._looking():
            return [mark > 0 for mark in self.marks.tolist()]

    def let_out(self) -> None:
        """Let the passenger take its elements; after the exchange."""
        if self.passenger is not None:
            with self._looking():
                self.passenger.take(self.seat)

    def _looking(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for a look at the marks that does not wait for the GPU's other work."""
        if self.marks.is_cuda:
            return torch.cuda.stream(_looking(self.marks.device))
        return contextlib.nullcontext()

    def take(self, number: int) -> None:
        """Move a parameter's gradient into the exchange's memory."""
        parameter, view = self.parameters[number], self.views[number]
        if parameter.grad is not view:
            with torch._C.DisableTorchFunctionSubclass():
                gradient = parameter.grad
                assert gradient is not None
                view.copy_(gradient.detach() if gradient.requires_grad else gradient)
            self._give(number)

    def has_graph(self, number: int) -> bool:
        """Whether backward could go through the parameter's gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            gradient = self.parameters[number].grad
            return gradient is not None and gradient.requires_grad

    def _give(self, number: int) -> None:
        """Set the parameter's gradient to its view of the exchange's memory."""
        parameter = self.parameters[number]
        try:
            parameter.grad = self.views[number]
        except RuntimeError as error:
            raise PlanError(
                f"parameter {self.names[number]} is {parameter.dtype} on {parameter.device} now, "
                f"and was {self.gradient.dtype} on {self.gradient.device} when it was attached: "
                "detach before a model is converted, and attach again"
            ) from error

    def _bring_home(self) -> None:
        """Copy gradients back that the program moved elsewhere (``p.grad.data = ...``)."""
        for number, (view, place) in enumerate(zip(self.views, self.places, strict=True)):
            if view.data_ptr() != place:
                self.views[number] = self._cut(self.gradient)[number].copy_(view)
                if self.parameters[number].grad is view:
                    self._give(number)

    def gather(self) -> None:
        """Put the gradients that the program has into the exchange, or zeros, and mark them."""
        self.release_gradients()
        self._bring_home()
        self.has = [each.grad is not None for each in self.parameters]
        for number, has in enumerate(self.has):
            if has:
                self.take(number)
            else:
                self.views[number].zero_()
        if all(self.has):
            self.marks.fill_(1)
        else:
            self.marks.copy_(torch.tensor(self.has))
        if self.passenger is not None:
            self.passenger.give(self.seat)
        self.arrived.clear()
        self.version = self.gradient._version

    def clear(self, set_to_none: bool = True) -> None:
        """Forget the gradients: autograd then brings its own, and need not add to zeros."""
        with torch._C.DisableTorchFunctionSubclass():
            for number, parameter in enumerate(self.parameters):
                tell_gradient(parameter)
                if set_to_none or parameter.grad is None:
                    parameter.grad = None
                else:
                    self.views[number].zero_()
                    self._give(number)
        if self.step is None:
            self.renew()

    def renew(self) -> None:
        """Begin anew: the gradients are this rank's."""
        self.release_gradients()
        self.arrived.clear()
        self.state = State.LOCAL

    def has_spent(self) -> bool:
        """Whether the program keeps one of the last exchange's gradients."""
        return any(each.grad is view for each, view in self._pairs())

    def _pairs(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        return zip(self.parameters, self.views, strict=True)

    def arrive(self) -> None:
        """Give the program the mean gradient of each parameter of which any rank had one."""
        self.state = State.AVERAGED
        self.release_gradients()
        self.release_parameters()
        self.has = self.reached()
        self.let_out()
        for number, has in enumerate(self.has):
            parameter = self.parameters[number]
            if has and self.step is None:
                self._give(number)
            elif not has and (self.step is None or parameter.grad is self.views[number]):
                parameter.grad = None

    @contextlib.contextmanager
    def lend_gradients(self) -> Iterator[list[nn.Parameter]]:
        """Yield the parameters that have a gradient in the exchange, with this one."""
        lent: list[nn.Parameter] = []
        kept: list[Tensor | None] = []
        for (parameter, view), has in zip(self._pairs(), self.has, strict=True):
            if has:
                lent.append(parameter)
                kept.append(parameter.grad)
                parameter.grad = view
        try:
            yield lent
        finally:
            for parameter, gradient in zip(lent, kept, strict=True):
                parameter.grad = gradient

    def claim(self) -> None:
        """Take the gradients of a step as they are now; later changes have no effect on it.

        PlanError: the program removed or replaced one while it was exchanged.
        """
        if self.state is State.EXCHANGING:
            self.require_whole()
            for number in range(len(self.parameters)):
                self._give(number)  # the others' gradient, perhaps
        elif self.state is State.AVERAGED:
            self.has = [each.grad is not None for each in self.parameters]
            for number, has in enumerate(self.has):
                if has:
                    self.take(number)

    def guard_gradients(self, ready: Callable[[], None]) -> None:
        """Call ``ready`` before the program uses a gradient."""
        for view in self.views:
            guard(view, ready)

    def release_gradients(self) -> None:
        """Give the gradients to the program."""
        release(self.views)

    def guard_parameters(self, ready: Callable[[], None], *, averages: bool) -> None:
        """Call ``ready`` before the program uses a parameter.

        ``averages`` : also before it asks for a gradient that only other ranks may have had
        """
        unknown = averages and self.state is State.EXCHANGING
        for parameter, had in zip(self.parameters, self.has, strict=True):
            guard(parameter, ready, unknown=unknown and not had)

    def release_parameters(self) -> None:
        """Give the parameters to the program."""
        release(self.parameters)

    def require_whole(self) -> None:
        """Refuse gradients that the program removed or replaced while they were exchanged."""
        for name, parameter, view, has in zip(
            self.names, self.parameters, self.views, self.has, strict=True
        ):
            if parameter.grad is not (view if has else None):
                raise PlanError(
                    f"the gradient of {name} was removed or replaced while it was exchanged: call "
                    "wait() before, then it is the mean of all ranks"
                )

    def require_unchanged(self) -> None:
        """Refuse a gradient that the program changed, through a view of it, while it travelled."""
        if self.gradient._version != self.version:  # the exchange's own writes do not count
            names = ", ".join(self.names)
            raise PlanError(
                f"the gradient of one of {names} was changed while it was exchanged: call wait() "
                "before"
            )

    def change_weights(self) -> None:
        """Let backward refuse to use the weights after this, as if the program had changed them."""
        with modes.left(), torch._C.DisableTorchFunctionSubclass():
            for parameter in self.parameters:
                torch.autograd.graph.increment_version(parameter)
        self.note_weights()

    def note_weights(self) -> None:
        """Remember the weights' versions: none may change until the layer's step is made."""
        with modes.left(), torch._C.DisableTorchFunctionSubclass():
            self.weight_versions = [each._version for each in self.parameters]

    def require_weights(self) -> None:
        """Refuse weights that the program changed, through a view of them, before their step."""
        before = self.weight_versions
        self.note_weights()  # told once
        for name, now, then in zip(self.names, self.weight_versions, before, strict=True):
            if now != then:
                raise PlanError(
                    f"parameter {name} was changed through a view (detach(), state_dict()) before "
                    "its step was made: call synchronize() before"
                )

    def require_in_place(self) -> None:
        """Refuse parameters that the program has moved since :meth:`move`."""
        with torch._C.DisableTorchFunctionSubclass():
            places = [each.data_ptr() for each in self.parameters]
        for name, place, home in zip(self.names, places, self.homes, strict=True):
            if place != home:
                raise PlanError(
                    f"parameter {name} has got other memory, but its owners write to the old one: "
                    "detach first, and attach again"
                )


@cache
def _looking(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def shaped(flat: Tensor, parameter: Tensor) -> Tensor:
    """View ``flat`` with the parameter's shape, in the order of the parameter's memory."""
    if _dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)


def _dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory, in whatever order (channels-last, say)."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def find_layers(model: nn.Module, optimizer: Optimizer) -> list[ModelLayer]:
    """Return the layers of all parameters that the optimizer trains, in the model's order.

    ConfigError: the optimizer has a parameter that the model lacks. BufferRefusedError: a parameter
    cannot be exchanged; names it.
    """
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(each):
            raise BufferRefusedError(
                f"{name} has no shape yet: call the model once, then attach it"
            )
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    layers: dict[tuple[nn.Module, torch.dtype], ModelLayer] = {}
    layer_of: dict[nn.Parameter, ModelLayer] = {}
    for place, module, key, parameter in _held(model):
        if parameter not in trained or not parameter.requires_grad:
            continue
        name = f"{place}.{key}" if place else key
        layer = layer_of.get(parameter)
        if layer is None:
            _require_exchangeable(name, module, parameter)
            new = ModelLayer(len(layers), place)
            layer = layers.setdefault((module, parameter.dtype), new)
            layer.parameters.append(parameter)
            layer.names.append(name)
            layer_of[parameter] = layer
        if module not in layer.modules:
            layer.modules.append(module)
    for layer in layers.values():
        for name, each in zip(layer.names, layer.parameters, strict=True):
            if each.device != next(iter(layer_of)).device:
                raise BufferRefusedError(
                    f"parameter {name} is on {each.device}, others are elsewhere"
                )
    require_in(layer_of.keys(), optimizer)
    if not layers:
        raise ConfigError("the optimizer trains nothing: no parameter of it requires a gradient")
    return list(layers.values())


def _held(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield every parameter of every module that holds it."""
    for place, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield place, module, key, parameter


def require_in(known: Any, optimizer: Optimizer) -> None:
    """Refuse an optimizer that trains a parameter which is not among the ``known`` ones."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and parameter not in known:
                raise ConfigError(
                    f"the optimizer's group {number} has a parameter of shape "
                    f"{list(parameter.shape)} that was not in the model when it was attached: "
                    "detach, and attach again with all parameters"
                )


def _require_exchangeable(name: str, module: nn.Module, parameter: nn.Parameter) -> None:
    if parameter.device.type not in ("cpu", "cuda"):
        raise BufferRefusedError(
            f"parameter {name} is on {parameter.device}: host or CUDA memory works"
        )
    if getattr(module, "sparse", False):
        raise BufferRefusedError(
            f"parameter {name} has sparse gradients: make it with sparse=False"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            f"parameter {name} is used by scripted code, which does not tell of it: attach the "
            "model before torch.jit, or use torch.compile"
        )
    if parameter in ATTACHED:
        raise ConfigError(f"parameter {name} is attached already: detach that first")
    try:
        native_dtype(as_numpy_dtype(parameter.dtype))
    except (BufferRefusedError, TypeError) as error:
        raise BufferRefusedError(f"parameter {name}: {error}") from None
