"""Kind "update": a block's owner makes its step, and the weights travel.

The owner has a block's mean gradient while backward still runs. It makes the step when the program
calls ``optimizer.step()``, with the hyperparameters of that moment, or leaves it out as the program
does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from pgasdl import _native
from pgasdl.context import Context
from pgasdl.errors import ConfigError, PlanError
from pgasdl.group import Group
from pgasdl.torch.attachment import modes
from pgasdl.torch.attachment.kinds import Kind
from pgasdl.torch.attachment.layers import ModelLayer, State
from pgasdl.torch.attachment.optimizer import PartialStep, has_step_hooks
from pgasdl.torch.attachment.shards import Shards, require_elementwise
from pgasdl.training.exchange import GradientExchange
from pgasdl.training.owner import Block


class Update(Kind):
    """The marks travel in an exchange of their own: every owner needs those of its parameters.

    The marks stay on the host, which sets and reads them, wherever the layers are. ``optimizer``
    acts on each element alone; ``options`` are those of :class:`GradientExchange`.
    """

    def __init__(
        self,
        layers: Sequence[ModelLayer],
        optimizer: Optimizer,
        step: PartialStep,
        context: Context,
        group: Group,
        timeout: float | None,
        **options: Any,
    ) -> None:
        require_elementwise(optimizer)
        if options.get("candidates"):
            raise ConfigError('kind="update" takes no candidates: owners keep their blocks')
        self.layers, self._optimizer, self._group = layers, optimizer, group
        self._held: deque[tuple[int, _native.Call]] = deque()
        self._leaving_out = False
        self.exchange = _HeldExchange(
            context,
            [((layer.count,), layer.dtype) for layer in layers],
            take_call=self._take_call,
            kind="update",
            update=self._update,
            group=group,
            timeout=timeout,
            device=layers[0].device,
            **options,
        )
        self._members: dict[int, list[ModelLayer]] = {}
        for layer in layers:
            self._members.setdefault(self.exchange.layers[layer.index].bucket, []).append(layer)
        try:
            shapes = [((layer.behind,), torch.float32) for layer in layers]
            self._marks = GradientExchange(context, shapes, group=group, timeout=timeout)
        except BaseException:
            self.exchange.close(finish=False)
            raise
        self._marked: set[int] = set()  # layers whose marks are under way
        self._shards = Shards(step, layers, self.exchange)
        # GradScaler then leaves gradients alone, and step() notices that a GradScaler is used.
        self._own_scaling = optimizer.__dict__.get("_step_supports_amp_scaling")
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def place(self) -> None:
        """Move the layers' gradients and weights."""
        weights = self.exchange.weights
        assert weights is not None
        for layer in self.layers:
            at, marks = self.exchange.layers[layer.index].at, self._marks.layers[layer.index]
            layer.place(
                self.exchange.gradients.torch(layer.dtype, at, layer.count),
                self._marks.gradients.torch(torch.float32, marks.at, marks.count),
            )
            layer.move(weights.torch(layer.dtype, at, layer.count))

    def ready(self, layer: ModelLayer) -> None:
        """Let the exchanges have the gradients of ``layer`` and its marks."""
        self._marks.ready(layer.index)
        self._marked.add(layer.index)
        super().ready(layer)
        self._answer_held()  # an early step may be due

    def before_use(self, layer: ModelLayer) -> None:
        """Refuse a use between backward and step: a peer may have called its step already."""
        if layer.state is State.EXCHANGING:
            raise PlanError(
                f"{', '.join(layer.names)}: used between backward and optimizer.step(), when "
                "owners may write already: call step() or zero_grad() first; "
                'kind="average" allows it'
            )

    def before_step(self, layers: Sequence[ModelLayer]) -> None:
        """Refuse steps that would need the mean gradient on every rank, or a captured graph."""
        self.exchange._require_no_capture('a step of kind "update"')
        if has_step_hooks(self._optimizer):
            raise ConfigError(
                "a hook of the optimizer's step would see this rank's part of the mean gradients "
                'alone: attach with kind="average", or remove the hook'
            )
        for layer in layers:
            layer.require_in_place()
            if layer.state is State.SPENT and layer.has_spent():
                raise PlanError(
                    f"the gradient of {', '.join(layer.names)} was used for the last step: "
                    "call zero_grad() after each step"
                )
            if layer.state is State.EXCHANGING:
                layer.require_unchanged()

    def stepped(self) -> None:
        """Make the updates that peers wait for already."""
        self._answer_held()

    def finish(self, layer: ModelLayer) -> None:
        """Wait for the new weights of ``layer``."""
        self._answer_held()
        self._await_marks(layer)
        self.exchange.wait(layer.index)
        layer.let_out()
        layer.release_parameters()
        layer.state = State.SPENT

    def complete(self) -> None:
        """Leave the step out: the weights travel as they are."""
        self.exchange._require_no_capture()
        self._leaving_out = True
        try:
            self._answer_held()
            self._marks.finish()
            self._marked.clear()
            self.exchange.finish()
        finally:
            self._leaving_out = False
        for layer in self.layers:
            layer.let_out()
            layer.release_parameters()
            layer.state = State.SPENT

    # --- the owner's part

    def _take_call(self, bucket: int, call: _native.Call) -> None:
        """Make the update that ``call`` asks for, or keep it until the program calls its step.

        It never waits, neither for the marks: who waits for one layer needs nothing of the others,
        and a peer that has that layer may wait elsewhere by now.
        """
        members = self._members[bucket]
        if members[0].step is None and not self._leaving_out:
            self._held.append((bucket, call))
            return
        marks = self._marks._schedule
        try:
            for layer in members if not self._leaving_out else ():
                if layer.index in self._marked and not marks.over(layer.index):
                    marks.postpone(call, layer.index)
                    return
                self._await_marks(layer)
            self.exchange._require_no_capture()
        except BaseException:
            _native.put_back(self.exchange.context, call)
            raise
        with modes.left():  # the modes of the code that answers peers' calls
            self.exchange.answer(bucket, call)

    def _answer_held(self) -> None:
        """Make every update whose step was called for and whose marks are here."""
        for _ in range(len(self._held)):
            self._take_call(*self._held.popleft())

    def _await_marks(self, layer: ModelLayer) -> None:
        """Wait for a layer's marks, unless that was done since they were ready."""
        if layer.index in self._marked:
            self._marks.wait(layer.index)
            self._marked.discard(layer.index)

    def _update(self, block: Block) -> None:
        members = self._members[block.bucket]
        settings = members[0].step
        if settings is None:  # left out
            return
        used = {
            each
            for layer in members
            for each, reached in zip(layer.parameters, layer.reached(), strict=True)
            if reached
        }
        self._shards.step(block, used, settings)

    # --- the optimizer's state

    def gather_state(self, whole: Any) -> None:
        """Put every rank's share into ``whole``. Collective."""
        self._shards.gather(whole, self.exchange.context, self._group)

    def scatter_state(self, whole: Any) -> None:
        """Keep this rank's share of ``whole``."""
        self._shards.scatter(whole)

    def close(self, *, finish: bool) -> None:
        """Give the memory back; the weights move to memory of their own."""
        if self._own_scaling is None:
            self._optimizer.__dict__.pop("_step_supports_amp_scaling", None)
        for layer in self.layers:
            for parameter in layer.parameters:
                parameter.data = parameter.data.clone()
        if self.layers[0].device.type == "cuda":  # or the memory would go before it is copied
            torch.cuda.current_stream(self.layers[0].device).synchronize()
        try:
            self._marks.close(finish=finish)
        finally:
            super().close(finish=finish)
            self._held.clear()


class _HeldExchange(GradientExchange):
    """Hands the owner's calls to ``take_call``, which answers them when their step is due."""

    def __init__(self, *given: Any, take_call: Callable[[int, _native.Call], None], **options: Any):
        super().__init__(*given, **options)
        self._take_call = take_call

    def serve(self, call: _native.Call) -> bool:
        """Hand ``call`` on if it belongs to this exchange."""
        number = self._schedule.bucket_of(call)
        if number >= 0:
            self._take_call(number, call)
        return number >= 0
