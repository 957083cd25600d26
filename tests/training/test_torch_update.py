"""What ``pgasdl.torch.attach`` in kind "update" does otherwise: owners make the steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.ranks import on_ranks
from tiers import full

torch = pytest.importorskip("torch")

from torch import nn, optim  # noqa: E402
from torch_tools import bits, loss_of, made, small  # noqa: E402
from training_programs import Probe  # noqa: E402

import pgasdl  # noqa: E402
from pgasdl import GradientExchange, _native, loopback  # noqa: E402
from pgasdl.errors import ConfigError, PlanError, UnavailableError  # noqa: E402
from pgasdl.torch import attach  # noqa: E402
from pgasdl.torch.attachment.update import Update  # noqa: E402

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


@pytest.mark.parametrize("plan", ["tree", "gdraa"])
def test_early_weights_arrive_while_backward_computes(plan: str) -> None:
    """Those of the last layer are on every rank before any rank has the first layer's gradient."""

    def program(ctx: Any, early: bool) -> Any:
        net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
        with torch.no_grad():
            for each in net.parameters():
                each.copy_(torch.linspace(-0.3, 0.4, each.numel()).view(each.shape))
        optimizer = optim.SGD(net.parameters(), 0.1, momentum=0.9)
        seen: list[Any] = []

        def probe() -> None:
            if early:
                assert net[0].weight.grad is None
                seen.append(net[2].weight.detach().clone())  # waits for it
                ctx.barrier()  # no rank goes on before all have seen it

        options = {"kind": "update", "early": True} if early else {}
        with attach(net, optimizer, context=ctx, plan=plan, **options):
            for step in range(3):
                x = torch.linspace(-1, step, 12).view(2, 6) * (ctx.rank + 1)
                net[2](net[1](Probe.apply(net[0](x), probe)).tanh()).square().mean().backward()
                optimizer.step()
                assert not early or torch.equal(net[2].weight, seen[step])
                optimizer.zero_grad()
        return bits(net)

    early = loopback.run(3, lambda ctx: program(ctx, True))
    assert early == loopback.run(3, lambda ctx: program(ctx, False))


@on_ranks(2)
def test_what_cannot_be_early_is_refused(ctx: Any) -> None:
    """Before it could be wrong; and the next attachment trains."""

    def attached(**options: Any) -> tuple[Any, Any, Any]:
        net, optimizer = small()
        return net, optimizer, attach(net, optimizer, context=ctx, early=True, **options)

    def backward(net: Any) -> None:
        net(torch.ones(2, 4, dtype=torch.float64)).sum().backward()

    with pytest.raises(ConfigError, match='needs kind="update"'):
        attached()
    net, optimizer, attachment = attached(kind="update")
    with attachment:
        backward(net)
        with pytest.raises(ConfigError, match='needs kind="average"'):
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with pytest.raises(PlanError, match=r"used between backward and optimizer\.step\(\)"):
            backward(net)
        optimizer.step()
    for change, why in (
        (lambda each: each.param_groups[0].update(lr=0.2), "lr of the optimizer's group 0 was 0.1"),
        (lambda each: each.zero_grad(), r"call optimizer.step\(\) after it"),
    ):
        net, optimizer, attachment = attached(kind="update")
        with pytest.raises(PlanError, match=why), attachment:
            backward(net)
            change(optimizer)
            optimizer.step()
    net, optimizer, attachment = attached(kind="update")
    with attachment:
        for _ in range(2):
            with attachment.no_sync():
                backward(net)
            backward(net)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("early", [False, True])
@on_ranks(2)
def test_backward_does_not_use_a_weight_that_an_owner_may_change(ctx: Any, early: bool) -> None:
    """PyTorch's error, where new weights would have given another gradient."""
    net, optimizer = small()
    with (
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
        attach(net, optimizer, context=ctx, kind="update", early=early),
    ):
        fixed = net[2].weight.detach()  # needed after the weight's own gradient is there
        hidden = net[0](torch.ones(2, 4, dtype=torch.float64)) @ fixed.T @ fixed
        net[2](hidden).sum().backward()


@pytest.mark.parametrize("kind", ["average", "update"])
@on_ranks(2)
def test_a_view_does_not_change_a_weight_before_its_step(ctx: Any, kind: str) -> None:
    net, optimizer = small()
    views = [each.detach() for each in net.parameters()]
    with attach(net, optimizer, context=ctx, kind=kind) as attached:
        net(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
        views[0].clamp_(max=0.1)
        with pytest.raises(PlanError, match=r"0\.weight was changed through a view"):
            attached.synchronize()
        attached.synchronize()
        views[0].clamp_(max=0.1)


@on_ranks(2, timeout=0.2)
def test_a_rank_that_evaluates_alone_is_told_what_to_do(ctx: Any) -> None:
    net, optimizer = small()
    with attach(net, optimizer, context=ctx, kind="update", timeout=20):
        net(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        if ctx.rank == 0:
            optimizer.step()
            with pytest.raises(pgasdl.PgasTimeoutError, match=r"call synchronize\(\) on all"):
                net(torch.ones(2, 4, dtype=torch.float64))
        ctx.barrier(timeout=20)
        if ctx.rank == 1:
            optimizer.step()


def test_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, whoever is at it, and the same can be called outside of it."""
    captures = threading.local()

    def refuse(exchange: GradientExchange, what: str = "") -> None:
        if getattr(captures, "now", False):
            raise UnavailableError("captured")

    monkeypatch.setattr(GradientExchange, "_require_no_capture", refuse)

    def refused(call: Callable[[], Any]) -> None:
        captures.now = True
        with pytest.raises(UnavailableError, match="captured"):
            call()
        captures.now = False

    def program(ctx: Any, capture: bool) -> bytes:
        net = made()
        optimizer = optim.SGD(net.parameters(), 0.1)
        with attach(net, optimizer, context=ctx, kind="update", plan="gdraa"):
            for step in range(2):
                if capture:
                    refused(loss_of(net, step, ctx.rank).backward)
                    optimizer.zero_grad()
                loss_of(net, step, ctx.rank).backward()
                if capture:
                    refused(optimizer.step)
                optimizer.step()
                optimizer.zero_grad()
        return bits(net)

    assert loopback.run(2, lambda ctx: program(ctx, True)) == loopback.run(
        2, lambda ctx: program(ctx, False)
    )


def test_an_update_that_is_due_in_a_capture_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[tuple[int, object]] = []
    refusals = [UnavailableError("captured"), None]

    class Exchange:
        context = None

        def _require_no_capture(self) -> None:
            if refusal := refusals.pop(0):
                raise refusal

        def answer(self, bucket: int, call: object) -> None:
            answered.append((bucket, call))

    kind = Update.__new__(Update)
    monkeypatch.setattr(kind, "exchange", Exchange(), raising=False)
    put_back: list[object] = []
    monkeypatch.setattr(_native, "put_back", lambda _, call: put_back.append(call))
    monkeypatch.setattr(kind, "_marks", SimpleNamespace(_schedule=None), raising=False)
    monkeypatch.setattr(kind, "_members", {3: [SimpleNamespace(step=None)]}, raising=False)
    monkeypatch.setattr(kind, "_leaving_out", True, raising=False)
    call: Any = object()
    with pytest.raises(UnavailableError, match="captured"):
        kind._take_call(3, call)
    assert put_back == [call] and not answered
    kind._take_call(3, call)
    assert answered == [(3, call)]


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


@on_ranks(2)
def test_weights_lie_in_the_exchange_as_they_did(ctx: Any) -> None:
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
                assert not optimizer.state.kept  # a look would gather it
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


@on_ranks(2)
def test_the_end_gives_back_what_was_there(ctx: Any) -> None:
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
