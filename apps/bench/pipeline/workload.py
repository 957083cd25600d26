"""The parts of a network's iteration: its layers, and each one's share of the work.

A layer is one parameter tensor, as in :func:`pgasdl.models.layers`. Nothing is computed: PyTorch's
meta device follows shapes alone through forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.pipeline.networks import NETWORKS, data


@dataclass(frozen=True, slots=True)
class Stage:
    """A module's forward pass: the layers that it uses, and its share of the iteration's work."""

    name: str
    layers: tuple[int, ...]
    share: float


@dataclass(frozen=True, slots=True)
class Workload:
    """An iteration; layers are in the order in which backward has their gradients."""

    names: tuple[str, ...]
    counts: tuple[int, ...]  # elements
    forward: tuple[Stage, ...]  # in the order of the forward pass
    # By layer: work between its gradient and the one before. All shares together are 1.
    backward: tuple[float, ...]


def workload(name: str, batch: int, size: int) -> Workload:
    """Return the iteration of a network.

    Work is counted in operations of modules with parameters; backward has twice those of forward,
    for the gradients of weights and of inputs.
    """
    with torch.device("meta"):
        network = NETWORKS[name].make()
        inputs, labels = data(name, batch, size, 0)
    watch = _Watch(network)
    nn.functional.cross_entropy(network(inputs), labels).backward()
    number = {key: index for index, key in enumerate(watch.arrived)}
    whole = 3 * sum(watch.work.values())
    stages = [
        Stage(place, tuple(number[key] for key in watch.uses[place]), work / whole)
        for place, work in watch.work.items()
    ]
    return Workload(
        tuple(watch.arrived),
        tuple(dict(network.named_parameters())[key].numel() for key in watch.arrived),
        tuple(stages),
        tuple(2 * work / whole for work in watch.arrived.values()),
    )


class _Watch:
    """Notes when modules compute, and when gradients arrive."""

    def __init__(self, network: nn.Module) -> None:
        self.work: dict[str, float] = {}
        self.uses: dict[str, list[str]] = {}
        self.arrived: dict[str, float] = {}  # layer: work of backward since the one before
        self._spent = 0.0
        names = {parameter: key for key, parameter in network.named_parameters()}
        for place, module in network.named_modules():
            held = list(module.parameters(recurse=False))
            if held:
                self.uses[place] = [names[each] for each in held]
                module.register_forward_hook(self._forward(place))
        for parameter, key in names.items():
            parameter.register_post_accumulate_grad_hook(self._arrival(key))

    def _forward(self, place: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any, output: Tensor) -> None:
            self.work[place] = _operations(module, output)

            def backward(_: Tensor) -> None:
                self._spent += self.work[place]

            output.register_hook(backward)

        return hook

    def _arrival(self, key: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            self.arrived[key], self._spent = self._spent, 0.0

        return hook


def _operations(module: nn.Module, output: Tensor) -> float:
    if isinstance(module, nn.Conv2d | nn.Linear):
        return 2 * output.numel() * module.weight[0].numel()
    return 4 * output.numel()  # normalizations; nearly nothing
