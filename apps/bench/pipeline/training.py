"""Iterations that compute: training steps of PyTorch, with gradients exchanged in several ways."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import pgasdl
import pgasdl.torch
from bench.cuts import DDP, buckets
from bench.pipeline.buckets import Buckets, describe
from bench.pipeline.networks import NETWORKS, data
from bench.pipeline.ours import Average
from bench.pipeline.waiting import LayerExchange
from bench.pipeline.workload import Workload
from bench.timeline import Recorder


class Training:
    """Every rank for itself; the others add an exchange."""

    def __init__(self, name: str, batch: int, size: int, rank: int) -> None:
        torch.manual_seed(0)
        self.recorder = Recorder()
        self.network = NETWORKS[name].make()
        self.model = self.network
        self.optimizer = torch.optim.SGD(self.network.parameters(), 1e-4, momentum=0.9)
        self.inputs, self.labels = data(name, batch, size, rank)
        self.plan = ""

    def loss(self) -> Tensor:
        """Compute the forward pass."""
        return nn.functional.cross_entropy(self.model(self.inputs), self.labels)

    def iterate(self) -> None:
        """Make one step; exchanges may still be under way when it returns."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def drain(self) -> None:
        """Let everything end."""

    def exchange(self) -> float:
        """Return the seconds of one exchange alone."""
        return 0.0

    def close(self) -> None:
        """Give the memory back."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record spans in the ``with`` block."""
        with Watch(self.network, self.recorder, self._taken):
            self.recorder.on = True
            yield
            self.recorder.on = False

    def _taken(self, module: str) -> None:
        """The module's gradients have been exchanged, and its step made."""


class Attached(Training):
    """``pgasdl.torch.attach``; ``phased``: exchanges begin when the backward pass is over."""

    def __init__(
        self,
        ctx: pgasdl.Context,
        name: str,
        batch: int,
        size: int,
        *,
        plan: str | None = None,
        phased: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(name, batch, size, ctx.rank)
        self._phased, self._barrier = phased, ctx.barrier
        self._attached = pgasdl.torch.attach(
            self.network,
            self.optimizer,
            context=ctx,
            plan=plan,
            deferred=False if phased else None,
            **options,
        )
        self._alone: Average | None = None
        if options.get("kind") == "update":  # alone, it would wait for a step
            counts = [layer.count for layer in reversed(self._attached.exchange.layers)]
            self._alone = Average(ctx, [""] * len(counts), counts, plan=plan, update=True)
        self.plan = self._attached.exchange.plan
        # As attach numbers its layers: modules with parameters that no module before them has.
        seen: set[nn.Parameter] = set()
        self._layer_of: dict[str, int] = {}
        for place, module in self.network.named_modules():
            held = set(module.parameters(recurse=False)) - seen
            if held:
                self._layer_of[place] = len(self._layer_of)
                seen |= held

    def iterate(self) -> None:
        self.optimizer.zero_grad()
        with self._attached.no_sync() if self._phased else contextlib.nullcontext():
            self.loss().backward()
        self.optimizer.step()

    def drain(self) -> None:
        self._attached.synchronize()

    def exchange(self) -> float:
        if self._alone is not None:
            return self._alone.exchange()
        exchange = self._attached.exchange
        self._barrier(timeout=600)
        began = time.monotonic()
        for layer in reversed(range(len(exchange.layers))):
            exchange.ready(layer)
        for layer in range(len(exchange.layers)):
            exchange.wait(layer)
        return time.monotonic() - began

    def close(self) -> None:
        if self._alone is not None:
            self._alone.close()
        self._attached.detach()

    def _taken(self, module: str) -> None:
        layer = self._layer_of.get(module)
        if layer is not None:
            timing = self._attached.exchange.timing(layer)
            self.recorder.add("exchange", module, timing.began, timing.ended)


class Ddp(Training):
    """DistributedDataParallel over a backend of torch.distributed, or with pgasdl's hook."""

    def __init__(
        self,
        ctx: pgasdl.Context,
        name: str,
        batch: int,
        size: int,
        work: Workload,
        group: Any,
        *,
        hook: bool = False,
    ) -> None:
        super().__init__(name, batch, size, ctx.rank)
        self._group, self._work = group, work
        self._state = pgasdl.torch.DDPState(ctx) if hook else None
        self.model = DistributedDataParallel(
            self.network,
            process_group=group,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
        )
        self.plan = describe(buckets(work.counts, DDP))
        if self._state is not None:
            self.model.register_comm_hook(self._state, pgasdl.torch.ddp_hook)
        self._buckets: Buckets | None = None

    def exchange(self) -> float:
        """Exchange buckets of the same sizes as DDP's."""
        if self._buckets is None:
            names, counts = self._work.names, self._work.counts
            self._buckets = Buckets(self._group, names, counts, state=self._state)
        return self._buckets.exchange()

    def close(self) -> None:
        if self._state is not None:
            self._state.close()
        distributed.destroy_process_group(self._group)


class ByLayers(Training):
    """Gradients lie in an exchange of layers, whose end a step awaits."""

    def __init__(
        self,
        name: str,
        batch: int,
        size: int,
        rank: int,
        n_ranks: int,
        work: Workload,
        exchange: LayerExchange,
    ) -> None:
        super().__init__(name, batch, size, rank)
        self._exchange = exchange
        self.recorder = exchange.recorder
        self._share = 1 / n_ranks if exchange.sums else 1.0
        self._n_layers = len(work.names)
        parameters = dict(self.network.named_parameters())
        for layer, key in enumerate(work.names):
            parameter = parameters[key]
            gradient = torch.as_tensor(exchange.gradients[layer])
            parameter.grad = gradient.view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(self._arrival(layer))

    def _arrival(self, layer: int) -> Callable[[Tensor], None]:
        return lambda _: self._exchange.ready(layer)

    def iterate(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        (self.loss() * self._share).backward()
        self._exchange.backward_done()
        for layer in reversed(range(self._n_layers)):
            self._exchange.take(layer)
        self.optimizer.step()

    def exchange(self) -> float:
        return self._exchange.exchange()

    def close(self) -> None:
        self._exchange.close()


class Watch:
    """Hooks that record when modules with parameters compute.

    ``taken`` is called with a module's place when it may compute: its exchange is over.
    """

    def __init__(
        self, network: nn.Module, recorder: Recorder, taken: Callable[[str], None]
    ) -> None:
        self._recorder, self._taken = recorder, taken
        self._hooks: list[Any] = []
        self._open: tuple[str, float, int] | None = None  # in backward: module, since, parameters
        self._before = self._begin = 0.0
        for place, module in network.named_modules():
            held = list(module.parameters(recurse=False))
            if held:
                self._add(place, module, held)

    def _add(self, place: str, module: nn.Module, held: list[nn.Parameter]) -> None:
        def before(*_: Any) -> None:
            self._before = time.monotonic()

        def begin(*_: Any) -> None:
            self._begin = time.monotonic()
            self._recorder.add("host", f"wait {place}", self._before, self._begin)
            self._taken(place)

        def end(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            self._recorder.add("forward", place, self._begin, time.monotonic())
            if output.requires_grad:
                output.register_hook(backward)

        def backward(_: Tensor) -> None:
            self._close()
            self._open = (place, time.monotonic(), len(held))

        def arrived(_: Tensor) -> None:
            if self._open is not None and self._open[0] == place:
                self._open = (*self._open[:2], self._open[2] - 1)
                if self._open[2] == 0:
                    self._close()
            self._before = time.monotonic()

        def turned(_: Tensor) -> None:
            self._recorder.add("host", f"turn {place}", self._before, time.monotonic())

        # The exchange's own hooks run between the first two, and between the last two.
        self._hooks += (
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_pre_hook(begin),
            module.register_forward_hook(end),
        )
        for parameter in held:
            self._hooks += (
                parameter.register_hook(arrived),
                parameter.register_post_accumulate_grad_hook(turned),
            )

    def _close(self) -> None:
        if self._open is not None:
            self._recorder.add("backward", self._open[0], self._open[1], time.monotonic())
            self._open = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._close()
        for hook in self._hooks:
            hook.remove()
