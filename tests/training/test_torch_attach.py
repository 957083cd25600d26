"""``pgasdl.torch.attach``: several ranks train the model of one process."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import pgasdl  # noqa: E402
from pgasdl import loopback  # noqa: E402
from pgasdl.torch import attach  # noqa: E402

STEPS = 4
RANKS = (2, 3)


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


def made(seed: int = 0, dtype: Any = torch.float64) -> Net:
    with _DRAWING:
        torch.manual_seed(seed)
        return Net().to(dtype)


def batch(step: int, rank: int, part: int = 0, dtype: Any = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    x = torch.randn(5, 2, 4, 4, generator=generator, dtype=torch.float64).to(dtype)
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


def train(ctx: Any, optimizer_of: Callable[..., Any], **options: Any) -> Any:
    net = made(seed=ctx.rank)  # the others get rank 0's
    optimizer, scheduler = optimizer_of(net)
    with attach(net, optimizer, context=ctx, **options):
        for step in range(STEPS):
            loss_of(net, step, ctx.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return copy.deepcopy(net.state_dict()), net


@pytest.mark.parametrize("optimizer_of", [sgd, adamw])
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 1 << 20}, {"deferred": False}], ids=str)
@pytest.mark.parametrize("size", RANKS)
def test_ranks_train_the_model_of_one_process(
    size: int, options: dict[str, Any], optimizer_of: Callable[..., Any]
) -> None:
    expected = reference(size, optimizer_of)
    results = loopback.run(size, lambda ctx: train(ctx, optimizer_of, **options))
    for state, net in results:
        same(net, expected)
        assert all(torch.equal(state[name], results[0][0][name]) for name in state)


def test_an_unused_parameter_is_left_alone() -> None:
    """By weight decay too, as in one process, where its gradient is None."""
    start = made().never.weight
    for _, net in loopback.run(2, lambda ctx: train(ctx, adamw)):
        assert torch.equal(net.never.weight, start)
        assert not torch.equal(net.rare.weight, made().rare.weight)


@pytest.mark.parametrize("deferred", [None, False])
def test_gradients_add_up_and_are_clipped(deferred: bool | None) -> None:
    def program(ctx: Any) -> Any:
        net = made()
        optimizer, scheduler = sgd(net)
        with attach(net, optimizer, context=ctx, deferred=deferred) as attached:
            for step in range(STEPS):
                optimizer.zero_grad()
                with attached.no_sync():
                    loss_of(net, step, ctx.rank, 0).backward()
                loss_of(net, step, ctx.rank, 1).backward()
                norm = attached.clip_grad_norm_(0.5)
                optimizer.step()
                scheduler.step()
        return float(norm), net

    expected = reference(2, sgd, parts=2, clip=0.5)
    (norm, net), (other_norm, other) = loopback.run(2, program)
    assert norm == other_norm > 0
    same(net, expected)
    same(other, expected)


def small(**options: Any) -> Any:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    return net, torch.optim.SGD(net.parameters(), 0.1, **options)


def alone(program: Callable[[Any], Any]) -> Any:
    return loopback.run(1, program)[0]


def test_gradients_lie_in_the_exchange_as_the_parameters_do() -> None:
    def program(ctx: Any) -> None:
        net = made().to(memory_format=torch.channels_last)
        optimizer, _ = sgd(net)
        with attach(net, optimizer, context=ctx) as attached:
            assert net.conv.weight.grad.stride() == net.conv.weight.stride() != (18, 9, 3, 1)
            grads = {each: each.grad for each in net.parameters() if each.requires_grad}
            memory = attached.exchange.gradients.torch()
            first, last = memory.data_ptr(), memory.data_ptr() + memory.numel()
            for _ in range(2):
                for each, grad in grads.items():
                    assert each.grad is grad and first <= grad.data_ptr() < last
                loss_of(net, 0, 0).backward()
                optimizer.step()
                net.zero_grad()
        assert all(each.grad is None for each in net.parameters())

    alone(program)


def test_a_gradient_that_the_program_removed_is_taken_in() -> None:
    def program(ctx: Any) -> Any:
        net, optimizer = small()
        x = torch.ones(3, 4, dtype=torch.float64)
        with attach(net, optimizer, context=ctx):
            for each in net.parameters():
                each.grad = None
            net(x).sum().backward()
            optimizer.step()
            gradients = [each.grad.clone() for each in net.parameters()]
        net.zero_grad()
        net(x).sum().backward()
        return net, gradients

    _, gradients = alone(program)
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes_and_a_narrow_wire(dtype: Any) -> None:
    def program(ctx: Any) -> Any:
        net = nn.Linear(4, 2).to(dtype)
        with torch.no_grad():
            for each in net.parameters():
                each.fill_(0.5)
        optimizer = torch.optim.SGD(net.parameters(), 1)
        wire = "bfloat16" if dtype is torch.float32 else None
        with attach(net, optimizer, context=ctx, wire=wire):
            net(torch.full((1, 4), ctx.rank, dtype=dtype)).sum().backward()
            optimizer.step()
        return net

    for net in loopback.run(2, program):
        assert (net.weight == 0).all() and (net.bias == -0.5).all()


def test_two_models_in_one_process() -> None:
    def program(ctx: Any) -> Any:
        (one, first), (two, second) = small(), small(momentum=0.5)
        x = torch.full((2, 4), 1.0 + ctx.rank, dtype=torch.float64)
        with attach(one, first, context=ctx), attach(two, second, context=ctx):
            for _ in range(3):
                (one(x).sum() + two(x).sum()).backward()
                for optimizer in (second, first):
                    optimizer.step()
                    optimizer.zero_grad()
        return one.state_dict(), two.state_dict()

    ours, theirs = loopback.run(2, program)
    for state, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(state[name], other[name]) for name in state)


def test_state_is_what_it_is_without() -> None:
    """Of model and optimizer, in the middle of training: what is due is done first."""

    def program(ctx: Any) -> Any:
        net = made()
        optimizer, _ = adamw(net)
        with attach(net, optimizer, context=ctx):
            loss_of(net, 0, ctx.rank).backward()
            optimizer.step()
            saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
            loss_of(net, 1, ctx.rank).backward()
            optimizer.step()
            net.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            optimizer.zero_grad()
            loss_of(net, 1, ctx.rank).backward()
            optimizer.step()
            again = copy.deepcopy(net.state_dict())
        return saved, again, net

    (saved, again, net), _ = loopback.run(2, program)
    plain = made()
    optimizer, _ = adamw(plain)
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(plain, step, rank) / 2).backward()
        optimizer.step()
    same(net, plain)
    assert all(torch.equal(again[name], value) for name, value in net.state_dict().items())
    plain_state = optimizer.state_dict()
    assert saved[1]["param_groups"] == plain_state["param_groups"]
    assert saved[1]["state"].keys() == plain_state["state"].keys()


def test_the_end_gives_back_what_was_there() -> None:
    def program(ctx: Any) -> None:
        net, optimizer = small()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        step = optimizer.step
        attached = attach(net, optimizer, context=ctx)
        assert optimizer.step is not step and "exchange average" in attached.describe()
        for _ in range(2):
            attached.detach()
        assert optimizer.step is step
        assert not any(module._forward_pre_hooks for module in net.modules())
        net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
        scheduler.step()
        with attach(net, optimizer, context=ctx):
            pass

    alone(program)


@pytest.mark.filterwarnings("error")
def test_a_scheduler_may_come_later() -> None:
    def program(ctx: Any) -> list[float]:
        net, optimizer = small()
        x = torch.ones(1, 4, dtype=torch.float64)
        with attach(net, optimizer, context=ctx):
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            weights = []
            for _ in range(2):
                net(x).sum().backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                net.state_dict()
                weights.append(float(net[2].bias[0].detach()))
        return weights

    first, second = alone(program)
    # The gradient of a bias is 1; the rate was 0.1 and half of it.
    assert second - first == pytest.approx(-0.05)


@pytest.mark.parametrize("first", ["compile", "attach"])
def test_a_compiled_model(first: str) -> None:
    def program(ctx: Any) -> Any:
        net = made()
        compiled = torch.compile(net, backend="eager")
        optimizer, _ = sgd(net)
        with attach(compiled if first == "compile" else net, optimizer, context=ctx):
            for step in range(2):
                loss_of(compiled, step, 0).backward()
                optimizer.step()
                optimizer.zero_grad()
        return net

    plain = made()
    optimizer, _ = sgd(plain)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(plain, step, 0).backward()
        optimizer.step()
    same(alone(program), plain)


def test_scaled_gradients_and_a_step_that_is_left_out() -> None:
    """A gradient that is infinite on one rank is so on all, and all leave the step out."""

    def program(ctx: Any) -> Any:
        net, optimizer = small()
        net.float()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with attach(net, optimizer, context=ctx) as attached:
            start = copy.deepcopy(net.state_dict())
            for step in range(2):
                bad = float("inf") if step == 0 and ctx.rank == 1 else 1.0
                loss = net(torch.ones(1, 4)).sum() * bad
                scaler.scale(loss).backward()
                attached.wait()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if step == 0:
                    assert all(torch.equal(start[k], v) for k, v in net.state_dict().items())
        return net[2].bias - start["2.bias"], scaler.get_scale()

    for change, scale in loopback.run(2, program):
        assert scale == 2.0
        torch.testing.assert_close(change.detach(), torch.full((2,), -0.1))


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
def test_a_step_may_be_left_out(bucket_bytes: int) -> None:
    """By all ranks: its gradients are forgotten."""

    def program(ctx: Any) -> Any:
        net = made()
        optimizer, scheduler = sgd(net)
        with attach(net, optimizer, context=ctx, bucket_bytes=bucket_bytes):
            for step in (0, 5, 1, 6, 2, 3):
                loss_of(net, step, ctx.rank).backward()
                if step < STEPS:
                    optimizer.step()
                    scheduler.step()
                optimizer.zero_grad()
        return net

    expected = reference(2, sgd)
    for net in loopback.run(2, program):
        same(net, expected)


def test_a_copy_is_not_attached() -> None:
    """As for an average of weights over time."""

    def program(ctx: Any) -> None:
        net, optimizer = small()
        x = torch.ones(1, 4, dtype=torch.float64)
        with attach(net, optimizer, context=ctx) as attached:
            mean = torch.optim.swa_utils.AveragedModel(net)
            for _ in range(2):
                net(x).sum().backward()
                optimizer.step()
                attached.synchronize()
                mean.update_parameters(net)
                copied = copy.deepcopy(net)
                assert torch.equal(copied(x), net(x))
                copied(x).sum().backward()
                copied.zero_grad()
                assert copied[0].bias.grad is None
                assert net[0].bias.grad is not None and net[2].bias.grad.abs().sum() > 0
                optimizer.zero_grad()

    alone(program)


def test_an_error_ends_it_at_once() -> None:
    """Without the steps that are due; model and optimizer can be attached again."""

    def program(ctx: Any) -> None:
        net, optimizer = small()
        x = torch.ones(1, 4, dtype=torch.float64)
        start = copy.deepcopy(net.state_dict())
        with (
            pytest.raises(KeyError, match="on purpose"),
            attach(net, optimizer, context=ctx),
        ):
            net(x).sum().backward()
            optimizer.step()
            raise KeyError("on purpose")
        assert all(torch.equal(start[name], value) for name, value in net.state_dict().items())
        with attach(net, optimizer, context=ctx):
            net(x).sum().backward()
            optimizer.step()
        assert not torch.equal(start["0.weight"], net[0].weight)

    alone(program)


def test_what_cannot_be_attached_is_refused() -> None:
    def program(ctx: Any) -> None:
        net, optimizer = small()
        other, _ = small()
        with pytest.raises(pgasdl.errors.ConfigError, match=r"shape \[6, 4\] that was not in"):
            attach(other, optimizer, context=ctx)
        wide = nn.Linear(2, 2, dtype=torch.complex64)
        with pytest.raises(pgasdl.BufferRefused, match="parameter weight: dtype"):
            attach(wide, torch.optim.SGD(wide.parameters()), context=ctx)
        meta = nn.Linear(2, 2, device="meta")
        with pytest.raises(pgasdl.BufferRefused, match="weight is on meta"):
            attach(meta, torch.optim.SGD(meta.parameters()), context=ctx)
        words = nn.Embedding(3, 2, sparse=True)
        with pytest.raises(pgasdl.BufferRefused, match="sparse"):
            attach(words, torch.optim.SGD(words.parameters()), context=ctx)
        frozen = nn.Linear(2, 2).requires_grad_(False)
        with pytest.raises(pgasdl.errors.ConfigError, match="trains nothing"):
            attach(frozen, torch.optim.SGD(frozen.parameters()), context=ctx)
        with pytest.raises(pgasdl.PlanError, match="no plan"):
            attach(net, optimizer, context=ctx, plan="none")
        with attach(net, optimizer, context=ctx):
            with pytest.raises(pgasdl.errors.ConfigError, match=r"0\.weight is attached already"):
                attach(net, optimizer, context=ctx)
            with pytest.raises(pgasdl.errors.ConfigError, match="closure"):
                optimizer.step(lambda: 0.0)
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})
            with pytest.raises(pgasdl.errors.ConfigError, match=r"group 1 .* shape \[7\]"):
                optimizer.step()

    alone(program)


def test_a_wrong_use_is_refused_before_it_harms() -> None:
    def program(ctx: Any) -> None:
        net, optimizer = small()
        x = torch.ones(1, 4, dtype=torch.float64)
        with attach(net, optimizer, context=ctx) as attached:
            net(x).sum().backward()
            with pytest.raises(pgasdl.PlanError, match=r"2\.\w+ gets another gradient .* no_sync"):
                net(x).sum().backward()
            optimizer.step()
            with pytest.raises(pgasdl.PlanError, match=r"0\.weight was used before its last step"):
                (x @ net[0].weight.T).sum().backward()
            attached.synchronize()
            optimizer.zero_grad()
            (x @ net[0].weight.T).sum().backward()  # now it is right
            optimizer.step()

    alone(program)


def _clip(net: Any) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)


def _clip_values(net: Any) -> None:
    nn.utils.clip_grad_value_(net.parameters(), 0.01)


@pytest.mark.parametrize("change", [_clip, _clip_values])
def test_a_gradient_that_is_changed_too_early_is_noticed(change: Callable[..., None]) -> None:
    def program(ctx: Any) -> None:
        net, optimizer = small()
        net.float()
        with attach(net, optimizer, context=ctx) as attached:
            for early in (False, True):
                net(torch.ones(1, 4)).sum().backward()
                if not early:
                    attached.wait()
                change(net)
                optimizer.step()
                if early:
                    with pytest.raises(pgasdl.PlanError, match=r"0\.weight.* before you clip"):
                        net(torch.ones(1, 4))
                        net[2](torch.ones(1, 6))
                    return
                optimizer.zero_grad()

    with contextlib.suppress(pgasdl.PlanError):
        alone(program)


def test_an_optimizer_of_ones_own_steps_once() -> None:
    class Normed(torch.optim.Optimizer):
        """Looks at all gradients at once."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:
            (group,) = self.param_groups
            grads = [each.grad for each in group["params"]]
            norm = torch.cat([each.flatten() for each in grads]).norm()
            with torch.no_grad():
                for each, grad in zip(group["params"], grads, strict=True):
                    each.sub_(grad / norm)

    def program(ctx: Any) -> Any:
        net, _ = small()
        optimizer = Normed(net.parameters())
        start = None
        with attach(net, optimizer, context=ctx) as attached:
            assert not attached.deferred
            start = torch.cat([each.detach().flatten() for each in net.parameters()])
            net(torch.full((1, 4), 1.0 + ctx.rank, dtype=torch.float64)).sum().backward()
            optimizer.step()
            end = torch.cat([each.detach().flatten() for each in net.parameters()])
        return end, start

    (end, start), (other, _) = loopback.run(2, program)
    assert torch.equal(end, other)
    torch.testing.assert_close((end - start).norm(), torch.ones((), dtype=torch.float64))
