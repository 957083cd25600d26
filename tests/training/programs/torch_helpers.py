"""PyTorch's own hooks and helpers over gloo and over the backend "pgasdl": the same training."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from ending import end_at_once
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

Optimizer = torch.optim.Optimizer
Parameters = list[nn.Parameter]


class Way:
    """One way to train; the methods are what DistributedDataParallel leaves open."""

    steps = 4

    def __init__(self, group: Any, alone: Any) -> None:
        self.group, self.alone = group, alone  # of all ranks, and of this one

    def hook(self, ddp: DistributedDataParallel) -> None:
        """Register a hook."""

    def optimizer(self, parameters: Parameters) -> Optimizer:
        """Make what steps."""
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    def during(
        self, ddp: DistributedDataParallel, optimizer: Optimizer
    ) -> contextlib.AbstractContextManager[Any]:
        """Return what lasts as long as the training."""
        return contextlib.nullcontext()


class Float16(Way):
    def hook(self, ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(self.group, default_hooks.fp16_compress_hook)


class BFloat16(Way):
    def hook(self, ddp: DistributedDataParallel) -> None:
        # Which DistributedDataParallel refuses, by its name, without a GPU.
        compress = functools.partial(default_hooks.bf16_compress_hook)
        compress.__qualname__ = compress.__name__ = "compress"
        ddp.register_comm_hook(self.group, compress)


class BuiltIn(Way):
    """Hooks that are C++ code."""

    kind = distributed.BuiltinCommHookType.ALLREDUCE

    def hook(self, ddp: DistributedDataParallel) -> None:
        ddp._register_builtin_comm_hook(self.kind)


class BuiltInFloat16(BuiltIn):
    kind = distributed.BuiltinCommHookType.FP16_COMPRESS


class PowerSGD(Way):
    """Its callbacks wait for other collectives."""

    function: Callable[..., Any] = staticmethod(powerSGD_hook.powerSGD_hook)

    def hook(self, ddp: DistributedDataParallel) -> None:
        state = powerSGD_hook.PowerSGDState(
            self.group, start_powerSGD_iter=2, min_compression_rate=1
        )
        ddp.register_comm_hook(state, self.function)


class CompressedPowerSGD(PowerSGD):
    function = staticmethod(default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook))


class PostLocalSGD(Way):
    def hook(self, ddp: DistributedDataParallel) -> None:
        state = PostLocalSGDState(self.group, self.alone, start_localSGD_iter=1)
        ddp.register_comm_hook(state, post_localSGD_hook)

    def optimizer(self, parameters: Parameters) -> Optimizer:
        averager = PeriodicModelAverager(period=2, warmup_steps=1, process_group=self.group)
        return PostLocalSGDOptimizer(super().optimizer(parameters), averager)


class ZeroRedundancy(Way):
    def optimizer(self, parameters: Parameters) -> Optimizer:
        return ZeroRedundancyOptimizer(
            parameters, torch.optim.Adam, process_group=self.group, lr=0.1
        )


class Uneven(Way):
    def __init__(self, group: Any, alone: Any) -> None:
        super().__init__(group, alone)
        self.steps = 3 + 2 * distributed.get_rank()

    def during(
        self, ddp: DistributedDataParallel, optimizer: Optimizer
    ) -> contextlib.AbstractContextManager[Any]:
        return Join([ddp])


class UnevenZeroRedundancy(Uneven, ZeroRedundancy):
    def during(
        self, ddp: DistributedDataParallel, optimizer: Optimizer
    ) -> contextlib.AbstractContextManager[Any]:
        return Join([ddp, optimizer])


WAYS = (
    Float16,
    BFloat16,
    BuiltIn,
    BuiltInFloat16,
    PowerSGD,
    CompressedPowerSGD,
    PostLocalSGD,
    ZeroRedundancy,
    Uneven,
    UnevenZeroRedundancy,
)


def trained(way: Way) -> torch.Tensor:
    """Train a model; return its weights."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    ddp = DistributedDataParallel(net, process_group=way.group)
    way.hook(ddp)
    optimizer = way.optimizer(list(ddp.parameters()))
    generator = torch.Generator().manual_seed(distributed.get_rank())
    with way.during(ddp, optimizer):
        for _ in range(way.steps):
            optimizer.zero_grad()
            ddp(torch.randn(4, 8, generator=generator)).square().mean().backward()
            optimizer.step()
    return torch.cat([each.detach().flatten() for each in net.parameters()])


def main() -> None:
    """Compare; one line for each way."""
    torch.set_num_threads(1)
    distributed.init_process_group("pgasdl")
    groups = []
    for backend in ("pgasdl", "gloo"):
        alone = [distributed.new_group([rank], backend=backend) for rank in range(2)]
        everybody = distributed.new_group(backend=backend)
        groups.append((everybody, alone[distributed.get_rank()]))
    for kind in WAYS:
        ours, theirs = (trained(kind(*each)) for each in groups)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        if distributed.get_rank() == 0:
            print(kind.__name__, "is right", flush=True)
    distributed.destroy_process_group()
    end_at_once()


main()
