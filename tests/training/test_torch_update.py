"""``pgasdl.torch.attach`` in kind "update": owners make the steps, and the weights travel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tiers import full

torch = pytest.importorskip("torch")

from torch import nn, optim  # noqa: E402
from torch_tools import (  # noqa: E402
    STEPS,
    adamw,
    alone,
    loss_of,
    made,
    reference,
    same,
    sgd,
    small,
)

from pgasdl import loopback  # noqa: E402
from pgasdl.torch import attach  # noqa: E402

WAYS: list[dict[str, Any]] = [
    {"plan": "gdraa-direct"},
    {"plan": "tree"},
    {"plan": "gdraa", "bucket_bytes": 1 << 20},
    {"plan": "tree", "bucket_bytes": 1 << 10, "rotate_root": True},
    {"deferred": False},
]
OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "SGD without state": lambda p: optim.SGD(p, 0.1),
    "Adam": lambda p: optim.Adam(p, 0.01, weight_decay=0.1, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, 0.01, foreach=True),
    "Adagrad": lambda p: optim.Adagrad(p, 0.01),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "Adadelta": lambda p: optim.Adadelta(p, 0.5),
    "Adamax": lambda p: optim.Adamax(p, 0.01),
    "NAdam": lambda p: optim.NAdam(p, 0.01),
    "RAdam": lambda p: optim.RAdam(p, 0.01),
    "ASGD": lambda p: optim.ASGD(p, 0.01, weight_decay=0.1),
    "Rprop": lambda p: optim.Rprop(p, 0.01),
}


def train(ctx: Any, optimizer_of: Any, steps: Any = range(STEPS), **options: Any) -> Any:
    net = made(seed=ctx.rank)  # the others get rank 0's
    optimizer, scheduler = optimizer_of(net)
    with attach(net, optimizer, context=ctx, **options):
        for step in steps:
            loss_of(net, step, ctx.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return net, optimizer


def bits(net: Any) -> list[bytes]:
    return [each.contiguous().numpy().tobytes() for each in net.state_dict().values()]


@pytest.mark.parametrize("optimizer_of", [sgd, adamw])
@pytest.mark.parametrize("options", full(WAYS, quick=3), ids=str)
@pytest.mark.parametrize("size", full([3, 2, 4], quick=1))
def test_ranks_train_the_model_of_one_process(
    size: int, options: dict[str, Any], optimizer_of: Any
) -> None:
    """Frozen, tied, and rarely or never used parameters included."""
    expected = reference(size, optimizer_of)
    results = loopback.run(size, lambda ctx: train(ctx, optimizer_of, kind="update", **options))
    for net, _ in results:
        same(net, expected)
        assert bits(net) == bits(results[0][0])


@pytest.mark.parametrize("name", full(OPTIMIZERS, quick=6))
def test_the_bits_of_kind_average(name: str) -> None:
    """In single precision, with parameters cut anywhere; and the optimizer's state, too."""

    def program(ctx: Any, kind: str) -> Any:
        net = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))
        with torch.no_grad():
            for number, each in enumerate(net.parameters()):
                each.copy_(torch.linspace(-0.3, 0.2 + number, each.numel()).view(each.shape))
        optimizer = OPTIMIZERS[name](net.parameters())
        with attach(net, optimizer, context=ctx, kind=kind, plan="gdraa"):
            for step in range(5):
                x = torch.linspace(-1, step, 21).view(3, 7) * (ctx.rank + 1)
                net(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return net, optimizer.state_dict()

    averaged = loopback.run(3, lambda ctx: program(ctx, "average"))
    updated = loopback.run(3, lambda ctx: program(ctx, "update"))
    for net, state in updated:
        assert bits(net) == bits(averaged[0][0])
        same_state(state, averaged[0][1])


def same_state(found: Any, wanted: Any) -> None:
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for number, state in wanted["state"].items():
        assert found["state"][number].keys() == state.keys()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(found["state"][number][key], value), (number, key)
                assert found["state"][number][key].stride() == value.stride()
            else:
                assert found["state"][number][key] == value


def test_an_unused_parameter_is_left_alone() -> None:
    """By weight decay and momentum too; whichever rank owns it."""
    start = made()
    results = loopback.run(
        3, lambda ctx: train(ctx, adamw, kind="update", plan="gdraa", bucket_bytes=1 << 20)
    )
    for net, optimizer in results:
        assert torch.equal(net.never.weight, start.never.weight)
        assert net.never.weight not in optimizer.state
        assert not torch.equal(net.rare.weight, start.rare.weight)
        assert optimizer.state[net.rare.weight]["step"] == STEPS - 2


def test_gradients_add_up() -> None:
    def program(ctx: Any) -> Any:
        net = made()
        optimizer, scheduler = sgd(net)
        with attach(net, optimizer, context=ctx, kind="update") as attached:
            for step in range(STEPS):
                optimizer.zero_grad()
                with attached.no_sync():
                    loss_of(net, step, ctx.rank, 0).backward()
                loss_of(net, step, ctx.rank, 1).backward()
                optimizer.step()
                scheduler.step()
        return net

    expected = reference(2, sgd, parts=2)
    for net in loopback.run(2, program):
        same(net, expected)


def test_weights_lie_in_the_exchange_as_they_did() -> None:
    def program(ctx: Any) -> None:
        net = made().to(memory_format=torch.channels_last)
        scalar = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        net.register_parameter("scalar", scalar)
        stride = net.conv.weight.stride()
        optimizer = optim.Adam(net.parameters(), 0.01)
        with attach(net, optimizer, context=ctx, kind="update") as attached:
            assert net.conv.weight.stride() == stride != (18, 9, 3, 1)
            memory = attached.exchange.weights.torch()
            first, last = memory.data_ptr(), memory.data_ptr() + memory.numel()
            for _ in range(2):
                (loss_of(net, 0, 0) * net.scalar).backward()
                optimizer.step()
                assert net.conv.weight.grad.stride() == stride
                net.zero_grad()
                for each in net.parameters():
                    assert not each.requires_grad or first <= each.data_ptr() < last
            names = [name for name, _ in net.named_parameters()]
            state = optimizer.state_dict()["state"][names.index("conv.weight")]
            assert state["exp_avg"].stride() == stride
        for each in net.parameters():
            assert each.grad is None and not first <= each.data_ptr() < last
        assert optimizer.state[scalar]["exp_avg"].shape == ()
        assert net.conv.weight.stride() == stride

    loopback.run(2, program)


@pytest.mark.parametrize("dtype", full([torch.float32, torch.bfloat16, torch.float16], quick=2))
def test_other_dtypes_and_a_narrow_wire(dtype: Any) -> None:
    def program(ctx: Any) -> Any:
        net = nn.Linear(4, 2).to(dtype)
        with torch.no_grad():
            for each in net.parameters():
                each.fill_(0.5)
        optimizer = optim.SGD(net.parameters(), 1)
        wire = "bfloat16" if dtype is torch.float32 else None
        plan = "gdraa" if wire else None
        with attach(net, optimizer, context=ctx, kind="update", wire=wire, plan=plan):
            net(torch.full((1, 4), ctx.rank, dtype=dtype)).sum().backward()
            optimizer.step()
        return net

    for net in loopback.run(2, program):
        assert (net.weight == 0).all() and (net.bias == -0.5).all()


def test_two_models_in_one_process() -> None:
    def program(ctx: Any) -> Any:
        (one, first), (two, second) = small(), small(momentum=0.5)
        x = torch.full((2, 4), 1.0 + ctx.rank, dtype=torch.float64)
        with (
            attach(one, first, context=ctx, kind="update"),
            attach(two, second, context=ctx, kind="update", plan="tree"),
        ):
            for _ in range(3):
                (one(x).sum() + two(x).sum()).backward()
                for optimizer in (second, first):
                    optimizer.step()
                    optimizer.zero_grad()
        return bits(one), bits(two)

    ours, theirs = loopback.run(2, program)
    assert ours == theirs


@pytest.mark.parametrize("plan", ["gdraa", "tree"])
def test_each_rank_keeps_its_share_of_the_state(plan: str) -> None:
    def program(ctx: Any) -> tuple[int, int]:
        net = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32))
        optimizer = optim.Adagrad(net.parameters())  # has its state at once
        whole = elements(optimizer.state)
        with attach(net, optimizer, context=ctx, kind="update", plan=plan) as attached:
            kept = []
            for _ in range(2):
                net(torch.ones(1, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                attached.synchronize()
                optimizer.state_dict()
                assert not optimizer.state
                kept.append(elements(attached._kind._shards._state))
        assert elements(optimizer.state) == whole == sum(p.numel() for p in net.parameters())
        assert kept[0] == kept[1]
        return kept[0], whole

    kept = loopback.run(3, program)
    assert sum(mine for mine, _ in kept) == kept[0][1]
    if plan == "gdraa":
        assert all(mine <= 1.02 * whole / 3 for mine, whole in kept)
    else:
        assert kept[0][0] == kept[0][1]  # the root's


def elements(state: Any) -> int:
    return sum(each.numel() for of in state.values() for each in of.values() if each.ndim)


def test_state_is_what_it_is_without() -> None:
    """In the middle of training; it continues in one process, and on another number of ranks."""

    def first(ctx: Any) -> Any:
        net = made()
        optimizer, scheduler = adamw(net)
        with attach(net, optimizer, context=ctx, kind="update", plan="gdraa"):
            for step in range(2):
                loss_of(net, step, 0).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            saved = [each.state_dict() for each in (net, optimizer, scheduler)]
            saved = copy.deepcopy(saved)
            loss_of(net, 2, 0).backward()
            optimizer.step()
            net.load_state_dict(saved[0])  # and back
            optimizer.load_state_dict(saved[1])
            optimizer.zero_grad()
            loss_of(net, 2, 0).backward()
            optimizer.step()
        return saved, net

    def second(ctx: Any, saved: Any, kind: str) -> Any:
        net = made()
        optimizer, scheduler = adamw(net)
        for each, state in zip((net, optimizer, scheduler), saved, strict=True):
            each.load_state_dict(copy.deepcopy(state))
        with attach(net, optimizer, context=ctx, kind=kind, plan="gdraa"):
            loss_of(net, 2, 0).backward()
            optimizer.step()
        return net

    plain = made()
    optimizer, scheduler = adamw(plain)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(plain, step, 0).backward()
        optimizer.step()
        scheduler.step()
        if step == 1:
            wanted = copy.deepcopy(optimizer.state_dict())
    results = loopback.run(3, first)
    for saved, net in results:
        assert saved[1]["param_groups"] == wanted["param_groups"]
        assert saved[1]["state"].keys() == wanted["state"].keys()
        same(net, plain)
    saved = results[0][0]
    for size, kind in ((1, "average"), (2, "update"), (4, "update")):
        for net in loopback.run(size, lambda ctx, kind=kind: second(ctx, saved, kind)):
            same(net, plain)


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
def test_a_step_may_be_left_out(bucket_bytes: int) -> None:
    """By all ranks: its gradients are forgotten."""

    def program(ctx: Any) -> Any:
        net = made()
        optimizer, scheduler = sgd(net)
        options = {"kind": "update", "bucket_bytes": bucket_bytes, "plan": "gdraa"}
        with attach(net, optimizer, context=ctx, **options):
            for step in (0, 5, 1, 6, 2, 3, 7):
                loss_of(net, step, ctx.rank).backward()
                if step < STEPS:
                    optimizer.step()
                    scheduler.step()
                if step < 7:  # the end, too, forgets it
                    optimizer.zero_grad()
        return net

    expected = reference(3, sgd)
    for net in loopback.run(3, program):
        same(net, expected)


@pytest.mark.parametrize("first", ["compile", "attach"])
def test_a_compiled_model(first: str) -> None:
    def program(ctx: Any) -> Any:
        net = made()
        compiled = torch.compile(net, backend="eager")
        optimizer, _ = sgd(net)
        given = compiled if first == "compile" else net
        with attach(given, optimizer, context=ctx, kind="update"):
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


def test_the_end_gives_back_what_was_there() -> None:
    def program(ctx: Any) -> None:
        net, optimizer = small(momentum=0.9)
        step = optimizer.step
        attached = attach(net, optimizer, context=ctx, kind="update")
        assert "exchange update" in attached.describe()
        x = torch.ones(1, 4, dtype=torch.float64)
        net(x).sum().backward()
        optimizer.step()
        for _ in range(2):
            attached.detach()
        assert optimizer.step == step
        assert "_step_supports_amp_scaling" not in optimizer.__dict__
        assert len(optimizer.state) == 4
        net(x).sum().backward()
        optimizer.step()
        with (
            pytest.raises(KeyError),
            attach(net, optimizer, context=ctx, kind="update"),
        ):
            net(x).sum().backward()
            raise KeyError
        with attach(net, optimizer, context=ctx):
            net(x).sum().backward()
            optimizer.step()

    loopback.run(2, program)
