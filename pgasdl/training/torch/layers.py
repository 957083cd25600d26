"""A model's parameters as layers of an exchange: those that one module holds travel together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pgasdl.buffers import as_numpy_dtype, native_dtype
from pgasdl.errors import BufferRefused, ConfigError, PlanError

Settings = list[dict[str, Any]]


class State(Enum):
    """Whose a layer's gradient is."""

    LOCAL = "this rank's"
    EXCHANGING = "under way"
    AVERAGED = "the mean of all ranks"
    SPENT = "what the owners' last step was made of"


@dataclass(eq=False, slots=True)
class Layer:
    """Parameters of one dtype that one module holds.

    Attributes
    ----------
    index : int
        Its number in the exchange.
    name : str
        The place in the model of the first module that holds it; "" is the model.
    parameters, names : list
        In the module's order.
    modules : list[nn.Module]
        All that hold one of the parameters.
    gradient : Tensor
        Every parameter's gradient, flat.
    marks : Tensor
        One element for each parameter; what comes back is above 0 if any rank's backward reached
        it.
    views : list[Tensor]
        Each parameter's part of ``gradient``.
    homes : list[int]
        Address of each parameter that was moved into an exchange.
    arrived : set[int]
        Numbers of the parameters that the backward which exchanges has reached so far.
    state : State
        Whose ``gradient`` is.
    version : int
        PyTorch's count of changes of ``gradient`` when its exchange began.
    step : Settings or None
        An optimizer step that the layer still has to make, with its hyperparameters.
    zero : bool or None
        What zero_grad() was told as ``set_to_none``, if the gradient is not needed after that step.
    """

    index: int
    name: str
    parameters: list[nn.Parameter] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    gradient: Tensor = field(default_factory=lambda: torch.empty(0))
    marks: Tensor = field(default_factory=lambda: torch.empty(0))
    views: list[Tensor] = field(default_factory=list)
    homes: list[int] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)
    state: State = State.LOCAL
    version: int = 0
    step: Settings | None = None
    zero: bool | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all its parameters."""
        return self.parameters[0].dtype

    @property
    def count(self) -> int:
        """Number of elements of all its parameters."""
        return sum(parameter.numel() for parameter in self.parameters)

    def place(self, gradient: Tensor, marks: Tensor) -> None:
        """Let every parameter's gradient be a view of ``gradient``, laid out as the parameter."""
        self.gradient, self.marks = gradient, marks
        self.views = self._cut(gradient)
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

    def mark(self, number: int) -> None:
        """Mark a parameter as reached by a backward of this rank."""
        self.marks[number] = 1

    def used(self) -> list[nn.Parameter]:
        """Return the parameters that any rank's backward reached."""
        marks = self.marks.tolist()
        return [each for each, mark in zip(self.parameters, marks, strict=True) if mark > 0]

    def take(self, number: int) -> None:
        """Let a parameter's gradient be its view: with what the program has, or zeros."""
        parameter, view = self.parameters[number], self.views[number]
        if parameter.grad is view:
            return
        if parameter.grad is None:
            view.zero_()
        else:
            view.copy_(parameter.grad)
        parameter.grad = view

    def take_all(self) -> None:
        """Let every parameter's gradient be its view."""
        for number in range(len(self.parameters)):
            self.take(number)

    def clear(self, set_to_none: bool = True) -> None:
        """Forget the gradient: autograd then brings its own, which is less than to add to zeros."""
        for number, parameter in enumerate(self.parameters):
            parameter.grad = None
            if not set_to_none:
                self.take(number)
        self.marks.zero_()
        self.arrived.clear()
        self.state = State.LOCAL
        self.zero = None

    def require_unchanged(self, advice: str) -> None:
        """Refuse a gradient that the program changed while it was exchanged."""
        if self.gradient._version != self.version:  # the exchange's own writes do not count
            names = ", ".join(self.names)
            raise PlanError(
                f"the gradient of one of {names} was changed while it was exchanged: {advice}"
            )

    def require_in_place(self) -> None:
        """Refuse parameters that the program has moved since :meth:`move`."""
        for name, parameter, home in zip(self.names, self.parameters, self.homes, strict=True):
            if parameter.data_ptr() != home:
                raise PlanError(
                    f"parameter {name} has got other memory, but its owners write to the old one: "
                    "detach first, and attach again"
                )


def shaped(flat: Tensor, parameter: Tensor) -> Tensor:
    """View ``flat`` with the parameter's shape, in the order of the parameter's memory."""
    if _dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)


def _dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory, in whatever order (channels-last, say)."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def find_layers(model: nn.Module, optimizer: Optimizer) -> list[Layer]:
    """Return the layers of all parameters that the optimizer trains, in the model's order.

    Raises
    ------
    ConfigError
        The optimizer has a parameter that the model has not.
    BufferRefused
        A parameter that cannot be exchanged; names it.
    """
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    layers: dict[tuple[nn.Module, torch.dtype], Layer] = {}
    layer_of: dict[nn.Parameter, Layer] = {}
    for place, module, key, parameter in _held(model):
        if parameter not in trained or not parameter.requires_grad:
            continue
        name = f"{place}.{key}" if place else key
        layer = layer_of.get(parameter)
        if layer is None:
            _require_exchangeable(name, module, parameter)
            new = Layer(len(layers), place)
            layer = layers.setdefault((module, parameter.dtype), new)
            layer.parameters.append(parameter)
            layer.names.append(name)
            layer_of[parameter] = layer
        if module not in layer.modules:
            layer.modules.append(module)
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
    if parameter.device.type != "cpu":
        raise BufferRefused(f"parameter {name} is on {parameter.device}: only host memory works")
    if getattr(module, "sparse", False):
        raise BufferRefused(f"parameter {name} has sparse gradients: make it with sparse=False")
    if getattr(parameter, "_pgasdl_attached", False):
        raise ConfigError(f"parameter {name} is attached already: detach that first")
    try:
        native_dtype(as_numpy_dtype(parameter.dtype))
    except (BufferRefused, TypeError) as error:
        raise BufferRefused(f"parameter {name}: {error}") from None
