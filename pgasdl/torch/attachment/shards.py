"""The parameters that one rank updates in kind "update", and its share of the optimizer's state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from pgasdl.context import Context
from pgasdl.errors import ConfigError
from pgasdl.group import Group
from pgasdl.torch.attachment.layers import ModelLayer, Settings, shaped
from pgasdl.torch.attachment.optimizer import PartialStep
from pgasdl.torch.attachment.replicate import allgather_objects
from pgasdl.training.exchange import GradientExchange
from pgasdl.training.owner import Block

# Those of PyTorch 2.13 that update an element from its own gradient and state, and a count of
# steps. Adafactor and Muon look at rows, LBFGS at everything, SparseAdam at sparse gradients.
ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)


def require_elementwise(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer that may look at more than one element at a time."""
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise ConfigError(
            f"an owner updates a part of a parameter, and {type(optimizer).__name__} may need all "
            f'of it: kind="average" does it; kind="update" works with {names}'
        )


@dataclass(eq=False, slots=True)
class Piece:
    """Elements [start, start + count) of a parameter, in the order of its memory.

    ``part`` is a view of these weights, and its ``grad`` one of their mean gradient.
    """

    parameter: nn.Parameter
    start: int
    count: int
    part: nn.Parameter


class Shards:
    """Makes an optimizer's step for this rank's blocks, and keeps their state.

    The optimizer acts on each element alone; ``exchange`` is of kind "update".
    """

    def __init__(
        self,
        step: PartialStep,
        layers: Sequence[ModelLayer],
        exchange: GradientExchange,
    ) -> None:
        self._step = step
        self._parameters = [each for layer in layers for each in layer.parameters]
        self._pieces = {
            (block.bucket, block.offset): list(_pieces(block, layers, exchange))
            for block in exchange.blocks
        }
        self._state: defaultdict[nn.Parameter, dict[str, Any]] = defaultdict(dict)

    def step(self, block: Block, used: set[nn.Parameter], settings: Settings) -> None:
        """Make the step for the parameters of ``block`` that are ``used``."""
        pieces = self._pieces[block.bucket, block.offset]
        pairs = [(each.parameter, each.part) for each in pieces if each.parameter in used]
        if pairs:
            self._step.of_parts(pairs, settings, self._state)

    def scatter(self, whole: Any) -> None:
        """Take the state of all parameters out of ``whole``, and keep this rank's share."""
        self._state.clear()
        for piece in self._all():
            if piece.parameter in whole:
                self._state[piece.part] = {
                    key: _cut(piece, value) for key, value in whole[piece.parameter].items()
                }
        for parameter in self._parameters:
            whole.pop(parameter, None)

    def gather(self, whole: Any, context: Context, group: Group) -> None:
        """Put the state of all parameters, from every rank, into ``whole``. Collective."""
        number_of = {parameter: number for number, parameter in enumerate(self._parameters)}
        mine = [
            (number_of[piece.parameter], piece.start, piece.count, self._state[piece.part])
            for piece in self._all()
            if piece.part in self._state
        ]
        found: defaultdict[int, list[tuple[int, int, dict[str, Any]]]] = defaultdict(list)
        for shares in allgather_objects(mine, context, group, self._parameters[0].device):
            for number, *share in shares:
                found[number].append(tuple(share))
        for number, shares in sorted(found.items()):
            parameter = self._parameters[number]
            whole[parameter] = {
                key: _joined(parameter, [(at, n, state[key]) for at, n, state in shares])
                for key in shares[0][2]
            }

    def _all(self) -> Iterator[Piece]:
        for pieces in self._pieces.values():
            yield from pieces


def _pieces(
    block: Block, layers: Sequence[ModelLayer], exchange: GradientExchange
) -> Iterator[Piece]:
    """Yield the part of each parameter that lies in ``block``."""
    assert exchange.weights is not None
    for layer in layers:
        where = exchange.layers[layer.index]
        if where.bucket != block.bucket:
            continue
        first_byte = where.at + (block.offset - where.offset) * where.dtype.itemsize
        weights = exchange.weights.torch(layer.dtype, first_byte, block.count)
        gradient = exchange.gradients.torch(layer.dtype, first_byte, block.count)
        at = where.offset - block.offset  # of the parameter, in the block
        for parameter in layer.parameters:
            begin, end = max(at, 0), min(at + parameter.numel(), block.count)
            if begin < end or (begin == end and not parameter.numel()):
                # A scalar's state cannot be told from a count of steps, so it stays a scalar.
                shape = () if parameter.ndim == 0 else (end - begin,)
                part = nn.Parameter(weights[begin:end].view(shape))
                part.grad = gradient[begin:end].view(shape)
                yield Piece(parameter, begin - at, end - begin, part)
            at += parameter.numel()


def _cut(piece: Piece, value: Any) -> Any:
    """Return the piece's part of a parameter's state; a value that has no elements stays whole."""
    whole = piece.parameter
    if not isinstance(value, Tensor):
        return value
    if value.shape != whole.shape or value.ndim == 0:
        return value.clone()
    flat = torch.empty(whole.numel(), dtype=value.dtype, device=value.device)
    with torch._C.DisableTorchFunctionSubclass():  # the shape is known before a step is made
        shaped(flat, whole).copy_(value)
    return flat[piece.start : piece.start + piece.count].clone()


def _joined(parameter: nn.Parameter, shares: Sequence[tuple[int, int, Any]]) -> Any:
    """Put a parameter's state together, of (start, count, part)."""
    _, count, first = shares[0]
    if not isinstance(first, Tensor) or first.shape != (count,):
        return first
    flat = torch.empty(parameter.numel(), dtype=first.dtype, device=first.device)
    for start, count, part in shares:
        flat[start : start + count] = part
    return shaped(flat, parameter)
