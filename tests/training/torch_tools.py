"""Tools for the tests of ``pgasdl.torch``: networks, their data, and one process's training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from support.ranks import on_ranks
from torch import nn

from pgasdl import loopback

STEPS = 4
ADVERSARY = {"seed": 1, "delay": 3, "reorder": True, "late_source": True}
WORLDS: dict[str, dict[str, Any]] = {
    "mapped": {},
    "unmapped-adversary": ADVERSARY | {"mapped": False, "refuse": 2},
    "unmapped": {"mapped": False},
    "adversary": ADVERSARY,
}


class Net(nn.Module):
    """Tied, frozen and normalised parameters, and one that only some inputs reach."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.first = nn.Linear(4 * 16, 8)
        self.tied = nn.Linear(64, 8, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.rare = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Any, rare: bool) -> Any:
        x = self.norm(self.conv(x)).relu().flatten(1)
        x = (self.first(x) + self.tied(x).tanh()) * self.scale
        x = self.frozen(x)
        if rare:
            x = x + self.rare(x)
        x = x + self.attention(x[:, None], x[:, None], x[:, None], need_weights=False)[0][:, 0]
        return self.last(x)


_DRAWING = threading.Lock()  # torch's generator is the threads' common one


def made(seed: int = 0) -> Net:
    with _DRAWING:
        torch.manual_seed(seed)
        return Net().double()


def made_small(seed: int) -> Any:
    with _DRAWING:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch(step: int, rank: int, part: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    x = torch.randn(5, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (5,), generator=generator)


def is_rare(step: int, rank: int) -> bool:
    return step >= 2 and rank == 0


def loss_of(net: Any, step: int, rank: int, part: int = 0) -> Any:
    x, y = batch(step, rank, part)
    return nn.functional.cross_entropy(net(x, is_rare(step, rank)), y)


def reference(
    size: int, optimizer_of: Callable[..., Any], *, parts: int = 1, clip: float | None = None
) -> Any:
    """One process that computes every rank's gradient."""
    net = made()
    optimizer, scheduler = optimizer_of(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            for part in range(parts):
                (loss_of(net, step, rank, part) / size).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return net


def sgd(net: Any) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def adamw(net: Any) -> Any:
    groups = [
        {"params": [p for n, p in net.named_parameters() if "weight" in n]},
        {"params": [p for n, p in net.named_parameters() if "weight" not in n], "lr": 0.003},
    ]
    optimizer = torch.optim.AdamW(groups, 0.01, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def same(net: Any, other: Any) -> None:
    for (name, a), b in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def bits(net: Any) -> list[bytes]:
    return [each.contiguous().numpy().tobytes() for each in net.state_dict().values()]


def small(**options: Any) -> Any:
    """A model that needs no more, and its optimizer."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    return net, torch.optim.SGD(net.parameters(), 0.1, **options)


def alone(program: Callable[[Any], Any]) -> Any:
    """The result of a program of one rank."""
    return loopback.run(1, program)[0]


def run(size: int, program: Any, world: str = "mapped", timeout: float = 20) -> list[Any]:
    """Run a program of ranks that are threads, in one of the worlds."""
    return loopback.run(size, program, timeout=timeout, **WORLDS[world])


ranks = partial(on_ranks, run=run)
