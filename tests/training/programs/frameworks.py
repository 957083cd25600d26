"""Train by Accelerate or Lightning with the backend "pgasdl" or with attach: as one process does.

Started by torchrun on two ranks, with the name of a function. Rank 0 prints "same" if every rank
has the weights of one process that trains in plain PyTorch.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from pgasdl.torch import attach

BATCH, TOGETHER, CLIP = 4, 2, 0.05  # of a rank; batches of a step; largest norm of its gradient


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(5)
    x = torch.randn(6 * BATCH * TOGETHER * 2, 6, generator=made, dtype=torch.float64)
    return TensorDataset(x, x[:, :3].sin())


def plain(together: int) -> nn.Module:
    """Train in one process, with the batches of both ranks."""
    model = net()
    optimizer = adam(model)
    for number, (x, y) in enumerate(DataLoader(data(), 2 * BATCH), 1):
        (functional.mse_loss(model(x), y) / together).backward()
        if number % together == 0:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return model


class OfThisRank(Iterable[list[Tensor]]):
    """Every second batch; which of them, is known when training begins."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        yield from islice(DataLoader(data(), BATCH), distributed.get_rank(), None, 2)

    def __len__(self) -> int:
        return len(data()) // (2 * BATCH)


def check(model: nn.Module, together: int = TOGETHER) -> None:
    """Compare with one process."""
    worst = max(
        float((a.detach() - b.detach()).abs().max())
        for a, b in zip(model.parameters(), plain(together).parameters(), strict=True)
    )
    assert worst < 1e-12, f"weights differ by {worst:g}"
    assert distributed.get_backend() == "pgasdl"
    distributed.barrier()
    if distributed.get_rank() == 0:
        print("same", flush=True)


# --- Accelerate


def accelerate(*, attached: bool) -> None:
    from accelerate import Accelerator

    distributed.init_process_group("pgasdl")  # which Accelerate takes; by itself it names gloo
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=TOGETHER)
    model = net()
    optimizer = adam(model)
    attachment: Any = None
    if attached:
        attachment = attach(model, optimizer, context=distributed.group.WORLD.context)
        accelerator.prepare_model(model, evaluation_mode=True)  # without DDP
        used, optimizer, loader = model, *accelerator.prepare(optimizer, DataLoader(data(), BATCH))
    else:
        used, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), BATCH))
    for x, y in loader:
        with accelerator.accumulate(used), contextlib.ExitStack() as stack:
            if attached and not accelerator.sync_gradients:
                stack.enter_context(attachment.no_sync())
            accelerator.backward(functional.mse_loss(used(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(used.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    if attached:
        attachment.detach()
    check(model)


def accelerate_backend() -> None:
    accelerate(attached=False)


def accelerate_attach() -> None:
    accelerate(attached=True)


def accelerate_script() -> None:
    """Run one of Accelerate's own test scripts."""
    distributed.init_process_group("pgasdl")
    name = sys.argv.pop(1)
    runpy.run_module(f"accelerate.test_utils.scripts.{name}", run_name="__main__", alter_sys=True)


# --- Lightning


def lightning(*, attached: bool) -> None:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = adam(self)
            if attached:
                self.attachment = attach(self, optimizer, context=distributed.group.WORLD.context)
            return optimizer

    if attached:
        distributed.init_process_group("pgasdl")
        strategy: Any = SingleDeviceStrategy("cpu")
    else:
        strategy = DDPStrategy(process_group_backend="pgasdl")
    together = 1 if attached else TOGETHER
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1 if attached else 2,
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=together,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Module()
    trainer.fit(module, OfThisRank())
    if attached:
        module.attachment.detach()
    check(module.net, together)


def lightning_backend() -> None:
    lightning(attached=False)


def lightning_attach() -> None:
    lightning(attached=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv.pop(1)]()
    if distributed.is_initialized():
        distributed.destroy_process_group()
