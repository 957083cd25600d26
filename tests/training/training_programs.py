"""Random training programs: what users of PyTorch do to gradients and weights, in any order.

A program runs in plain PyTorch on the whole batch, and attached on each rank with its part of the
batch. Then all weights, and all that the program has seen of weights and gradients, are the same;
or the program is refused, if it does something that may be refused.

    python tests/training/training_programs.py 0:10000
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import pgasdl
from pgasdl import loopback
from pgasdl.torch import attach

WIDTH, ROWS = 4, 6  # of a batch; divided by 1, 2 and 3 ranks
_DRAWING = threading.Lock()  # torch's generator is the threads' common one


# --- models: parts that map a batch to one of the same shape; some rows may be left out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return x + self.inner(x[:, None], x[:, None], x[:, None], need_weights=False)[0][:, 0]


class Uncalled(nn.Module):
    """Uses a module's weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return nn.functional.linear(x, self.inner.weight).tanh() + self.inner.bias


class Functional(nn.Module):
    """Calls a module with parameters that are computed from its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        halves = {name: each * 0.5 for name, each in self.inner.named_parameters()}
        return x + torch.func.functional_call(self.inner, halves, (x,))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Any) -> Any:
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def forward(self, x: Any) -> Any:
        return x + self.two(self.one(x).tanh())


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def pruned() -> nn.Module:
    layer = linear()
    mask = torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) % 3 > 0
    prune.custom_from_mask(layer, "weight", mask)
    return layer


def frozen() -> nn.Module:
    return linear().requires_grad_(False)


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "attention": Attention,
    "uncalled": Uncalled,
    "functional": Functional,
    "checkpointed": Checkpointed,
    "tied": Tied,
    "pruned": pruned,
    "weight_norm": lambda: nn.utils.weight_norm(linear()),
    "spectral_norm": lambda: nn.utils.spectral_norm(linear()),
    "parametrized": lambda: parametrizations.weight_norm(linear()),
    "frozen": frozen,
    "unused": linear,
    "rare": linear,
}


class Probe(torch.autograd.Function):
    """Does something when backward comes to it."""

    @staticmethod
    def forward(ctx: Any, x: Any, probe: Callable[[], None]) -> Any:
        ctx.probe = probe
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ctx.probe()
        return gradient, None


class Model(nn.Module):
    probe: Callable[[], None] | None = None

    def __init__(self, parts: list[str]) -> None:
        super().__init__()
        self.kinds = parts
        self.parts = nn.ModuleList(PARTS[each]() for each in parts)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Any, rare: Any) -> Any:
        """``rare``: 1 for the rows that use the parts which not all use."""
        if self.probe is not None:
            x = Probe.apply(x.requires_grad_(), self.probe)
        for kind, part in zip(self.kinds, self.parts, strict=True):
            if kind == "rare":
                if rare.any():
                    x = x + rare[:, None] * part(x)
            elif kind != "unused":
                x = part(x).tanh()
        return x * self.scale


class Normed(torch.optim.Optimizer):
    """Looks at all gradients at once."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        some = [each for each in group["params"] if each.grad is not None]
        norm = 1 + sum(float(each.grad.square().sum()) for each in some)
        for each in some:
            each.sub_(each.grad, alpha=group["lr"] / norm)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.02, eps=0.1, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.02, eps=0.1),
    "normed": Normed,
}


# --- the run of one program


@dataclass
class Run:
    """One process of a program: plain PyTorch, or a rank of several."""

    program: Program
    model: Model
    optimizer: torch.optim.Optimizer
    rank: int = 0
    size: int = 1
    attached: Any = None
    seen: list[Any] = field(default_factory=list)
    ema: list[Any] | None = None

    def __post_init__(self) -> None:
        self.outer = nn.ModuleList([self.model])

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [each for each in self.model.parameters() if each.requires_grad]

    def loss(self, step: int, half: int | None = None) -> Any:
        generator = torch.Generator().manual_seed(
            1000 * self.program.seed + 10 * step + (half or 0)
        )
        x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        rare = torch.tensor(self.program.rare[step], dtype=torch.float64)
        rows = slice(self.rank * ROWS // self.size, (self.rank + 1) * ROWS // self.size)
        return self.model(x[rows], rare[rows]).square().mean()

    def no_sync(self) -> Any:
        return self.attached.no_sync() if self.attached else contextlib.nullcontext()

    def see(self, *values: Any) -> None:
        self.seen += [float(each) for each in values]


def meet(run: Run) -> None:
    """Wait elsewhere while backward computes: one layer may have its weights, others not."""
    run.model.scale.detach().clone()
    run.attached.exchange.context.barrier()


def backward(run: Run, step: int) -> None:
    run.loss(step).backward()


def twice(run: Run, step: int) -> None:
    with run.no_sync():
        run.loss(step).backward()
    run.loss(step, 1).backward()


def twice_at_once(run: Run, step: int) -> None:
    run.loss(step).backward()
    run.loss(step, 1).backward()


def by_hand(run: Run, step: int) -> None:
    """A gradient that the program sets is its rank's own until wait() or step()."""
    found = torch.autograd.grad(run.loss(step), run.parameters, allow_unused=True)
    for each, gradient in zip(run.parameters, found, strict=True):
        each.grad = gradient
    if run.program.turns[step][1]:
        wait(run)


def sharpness(run: Run, step: int) -> None:
    """SAM: a second backward at weights that the first gradient has moved."""
    run.loss(step).backward()
    with torch.no_grad():
        moved = [(each, each.grad * 0.1) for each in run.parameters if each.grad is not None]
        for each, by in moved:
            each.add_(by)
    run.optimizer.zero_grad()
    run.loss(step, 1).backward()
    with torch.no_grad():
        for each, by in moved:
            each.sub_(by)


def left_out(run: Run, step: int) -> None:
    run.loss(step).backward()
    run.optimizer.zero_grad()
    run.loss(step, 1).backward()


BACKWARDS = (backward, twice, twice_at_once, by_hand, sharpness, left_out)


def _gradients(run: Run) -> list[Any]:
    return [each.grad for each in run.parameters if each.grad is not None]


def clip_norm(run: Run) -> None:
    run.see(nn.utils.clip_grad_norm_(run.model.parameters(), 0.1))


def clip_value(run: Run) -> None:
    if _gradients(run):  # of none, PyTorch's fails
        nn.utils.clip_grad_value_(run.model.parameters(), 0.01)


def replace(run: Run) -> None:
    for each in run.parameters:
        if each.grad is not None:
            each.grad = torch.nan_to_num(each.grad).clamp(-0.02, 0.02)


def behind_its_back(run: Run) -> None:
    for each in _gradients(run):
        each.data.clamp_(-0.02, 0.02)


def noise(run: Run) -> None:
    for number, each in enumerate(_gradients(run)):
        each.add_(torch.sin(torch.arange(each.numel()).double() + number).view_as(each) / 100)


def look(run: Run) -> None:
    run.see(*(each.square().sum() for each in _gradients(run)))


def cancel(run: Run) -> None:
    for each in run.parameters[-2:]:
        each.grad = None


def wait(run: Run) -> None:
    if run.attached:
        run.attached.wait()


def numpy(run: Run) -> None:
    for each in _gradients(run):
        each.numpy()[...] *= 0.5


BETWEEN = (clip_norm, clip_value, replace, behind_its_back, noise, look, cancel, wait, numpy)


def forget(run: Run) -> None:
    run.optimizer.zero_grad()


def forget_to_zeros(run: Run) -> None:
    run.optimizer.zero_grad(set_to_none=False)


def forget_model(run: Run) -> None:
    run.model.zero_grad()


def forget_around(run: Run) -> None:
    run.outer.zero_grad()


def forget_parts(run: Run) -> None:
    for part in run.model.parts:
        part.zero_grad()
    run.model.scale.grad = None


def forget_each(run: Run) -> None:
    for each in run.parameters:
        each.grad = None


def forget_in_place(run: Run) -> None:
    for each in _gradients(run):
        each.zero_()


def forget_nothing(run: Run) -> None:
    pass


ENDS = (forget, forget_to_zeros, forget_model, forget_around, forget_parts, forget_each,
        forget_in_place, forget_nothing)  # fmt: skip


@torch.no_grad()
def average(run: Run) -> None:
    if run.ema is None:
        run.ema = [each.detach().clone() for each in run.parameters]
    for mean, each in zip(run.ema, run.parameters, strict=True):
        mean.mul_(0.9).add_(each.data, alpha=0.1)


def clamp_weights(run: Run) -> None:
    for each in run.parameters:
        each.data.clamp_(-0.5, 0.5)


def vector(run: Run) -> None:
    run.see(nn.utils.parameters_to_vector(run.parameters).square().sum())


def state(run: Run) -> None:
    saved = run.model.state_dict()
    run.see(*(each.double().sum() for each in saved.values()))
    run.model.load_state_dict({name: each * 0.9 for name, each in saved.items()})


def optimizer_state(run: Run) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def copied(run: Run) -> None:
    if {"pruned", "weight_norm", "spectral_norm"} & set(run.model.kinds) or run.program.meets:
        return  # which cannot be copied
    other = copy.deepcopy(run.model)
    run.see(*(each.detach().sum() for each in other.parameters()))
    other.zero_grad()


def rate(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.8


BEHIND = (average, clamp_weights, vector, state, optimizer_state, copied, rate)

# Programs that may be refused: by kind "average"; where ranks' backwards reach different
# parameters; and by kind "update", in which no rank has the mean gradient.
REFUSED: set[Any] = {twice_at_once, left_out}
REFUSED_IF_REACHED_DIFFERENTLY: set[Any] = {*BETWEEN, sharpness} - {wait}
REFUSED_BY_UPDATE: set[Any] = {*BETWEEN, sharpness, *ENDS, *BEHIND} - {forget, forget_model, rate}


@dataclass(frozen=True)
class Program:
    """A random one."""

    seed: int

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        parts = draw.choices(list(PARTS), k=draw.randint(1, 4))
        turns = draw.randint(2, 5)
        some = (0, 0, 0, 1) if "rare" in parts else (0,)
        values = {
            "parts": parts,
            "optimizer": draw.choice(list(OPTIMIZERS)),
            "size": draw.choice((1, 2, 2, 3)),
            "deferred": draw.choice((None, None, False)),
            "kind": draw.choice(("average", "average", "average", "update")),
            "bucket_bytes": draw.choice((0, 0, 300)),
            "rare": [[draw.choice(some) for _ in range(ROWS)] for _ in range(turns)],
            "turns": [
                (
                    draw.choices(BACKWARDS, (10, 2, 0.3, 1, 1, 1))[0],
                    draw.sample(BETWEEN, draw.choice((0, 0, 1, 2))),
                    draw.choices(ENDS, (6, 1, 1, 1, 1, 1, 1, 0.5))[0],
                    draw.sample(BEHIND, draw.choice((0, 0, 1, 2))),
                    draw.random() < 0.5,  # whether the end comes before what is behind
                )
                for _ in range(turns)
            ],
        }
        if values["optimizer"] == "normed":
            values |= {"deferred": None, "kind": "average"}
        values["early"] = values["kind"] == "update" and self.seed % 2 == 1
        # With buckets a layer may wait for others that have no gradient yet.
        values["meets"] = values["early"] and not values["bucket_bytes"]
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:  # for mypy: what __post_init__ sets
        raise AttributeError(name)

    def __str__(self) -> str:
        turns = [
            " ".join(
                each.__name__
                for each in (one, *between, *((end, *behind) if first else (*behind, end)))
            )
            for one, between, end, behind, first in self.turns
        ]
        return (
            f"seed {self.seed}: {self.parts}, {self.optimizer}, {self.size} ranks, {self.kind}, "
            f"early {self.early}, deferred {self.deferred}, meets {self.meets}: "
            + " | ".join(turns)
        )

    def made(self) -> tuple[Model, torch.optim.Optimizer]:
        with _DRAWING:
            torch.manual_seed(self.seed)
            model = Model(self.parts).double()
        return model, OPTIMIZERS[self.optimizer](
            [each for each in model.parameters() if each.requires_grad]
        )

    def run(self, run: Run) -> Run:
        for step, (one, between, end, behind, first) in enumerate(self.turns):
            one(run, step)
            for each in between:
                each(run)
            run.optimizer.step()
            for each in (end, *behind) if first else (*behind, end):
                each(run)
        return run

    def plain(self) -> Run:
        return self.run(Run(self, *self.made()))

    def attached(self) -> list[Run]:
        def rank(ctx: Any) -> Run:
            model, optimizer = self.made()
            options = {"kind": self.kind, "deferred": self.deferred, "early": self.early}
            with attach(
                model, optimizer, context=ctx, bucket_bytes=self.bucket_bytes, **options
            ) as attached:
                run = Run(self, model, optimizer, ctx.rank, ctx.size, attached)
                model.probe = partial(meet, run) if self.meets else None
                self.run(run)
                model.probe = None
                return run

        return loopback.run(self.size, rank, timeout=30)

    def causes(self) -> set[str]:
        """Names of what may be refused in it."""
        found = {each.__name__ for each in self._actions() if each in REFUSED}
        if self.kind == "update":
            found |= {each.__name__ for each in self._actions() if each in REFUSED_BY_UPDATE}
        reached = [
            {
                any(rare[r * ROWS // self.size : (r + 1) * ROWS // self.size])
                for r in range(self.size)
            }
            for rare in self.rare
        ]
        for turn, ranks in zip(self.turns, reached, strict=True):
            if len(ranks) > 1:
                found |= {
                    each.__name__
                    for each in (turn[0], *turn[1])
                    if each in REFUSED_IF_REACHED_DIFFERENTLY
                }
        if cancel in self._actions():
            found.add("cancel")
        return found

    def _actions(self) -> Iterator[Any]:
        for one, between, end, behind, _ in self.turns:
            yield from (one, *between, end, *behind)

    def check(self) -> str:
        """Run it both ways; "same" or "refused", or AssertionError."""
        expected = self.plain()
        try:
            found = self.attached()
        except (pgasdl.PlanError, pgasdl.errors.ConfigError) as error:
            assert self.causes(), f"{self}\nrefused without a cause: {error}"
            return "refused"
        for run in found:
            _same(run, expected, found[0], str(self))
        return "same"


def _same(run: Run, expected: Run, first: Run, what: str) -> None:
    close = partial(torch.testing.assert_close, rtol=1e-7, atol=1e-9)
    pairs = zip(run.model.named_parameters(), expected.model.parameters(), strict=True)
    for (name, mine), theirs in pairs:
        close(mine, theirs, msg=lambda m, name=name: f"{what}\n{name}: {m}")
    assert len(run.seen) == len(expected.seen), what
    close(torch.tensor(run.seen), torch.tensor(expected.seen), msg=lambda m: f"{what}\nseen: {m}")
    for mine, theirs in zip(run.ema or (), expected.ema or (), strict=True):
        close(mine, theirs, msg=lambda m: f"{what}\naverage over time: {m}")
    for mine, theirs in zip(run.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), f"{what}\nranks have not the same weights"


def main() -> None:
    """Check the programs of a range of seeds."""
    begin, end = map(int, sys.argv[1].split(":"))
    counts: Counter[str] = Counter()
    for seed in range(begin, end):
        try:
            counts[Program(seed).check()] += 1
        except Exception as error:
            counts["wrong"] += 1
            print(f"{type(error).__name__}: {error}"[:1500], flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
