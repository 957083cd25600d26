"""``pgasdl.torch.attach`` refuses what cannot be attached, and a wrong use before it harms."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
from support.ranks import on_ranks

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_tools import bits, made_small, same, small  # noqa: E402

import pgasdl  # noqa: E402
from pgasdl import loopback  # noqa: E402
from pgasdl.torch import attach  # noqa: E402
from pgasdl.torch.attachment.layers import ATTACHED  # noqa: E402

kinds = pytest.mark.parametrize("kind", ["average", "update"])


@on_ranks(1)
def test_what_cannot_be_attached_is_refused(ctx: Any) -> None:
    net, optimizer = small()
    other, _ = small()
    with pytest.raises(pgasdl.errors.ConfigError, match=r"shape \[6, 4\] that was not in"):
        attach(other, optimizer, context=ctx)
    wide = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(pgasdl.BufferRefusedError, match="parameter weight: dtype"):
        attach(wide, torch.optim.SGD(wide.parameters()), context=ctx)
    meta = nn.Linear(2, 2, device="meta")
    with pytest.raises(pgasdl.BufferRefusedError, match="weight is on meta"):
        attach(meta, torch.optim.SGD(meta.parameters()), context=ctx)
    words = nn.Embedding(3, 2, sparse=True)
    with pytest.raises(pgasdl.BufferRefusedError, match="sparse"):
        attach(words, torch.optim.SGD(words.parameters()), context=ctx)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(pgasdl.errors.ConfigError, match="trains nothing"):
        attach(frozen, torch.optim.SGD(frozen.parameters()), context=ctx)
    with pytest.raises(pgasdl.PlanError, match="no plan"):
        attach(net, optimizer, context=ctx, plan="none")
    with attach(net, optimizer, context=ctx):
        with pytest.raises(pgasdl.errors.ConfigError, match=r"0\.weight is attached already"):
            attach(net, optimizer, context=ctx)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})
        with pytest.raises(pgasdl.errors.ConfigError, match=r"group 1 .* shape \[7\]"):
            optimizer.step()

    lbfgs = torch.optim.LBFGS(other.parameters())
    refused = pytest.raises(pgasdl.errors.ConfigError, match="closure")
    with attach(other, lbfgs, context=ctx), refused:
        lbfgs.step(lambda: 0.0)
    wrapper = torch.optim.SGD(other.parameters())
    wrapper.optimizer = lbfgs  # as Accelerate's and Lightning's have it
    with pytest.raises(pgasdl.errors.ConfigError, match="SGD wraps the LBFGS that makes"):
        attach(other, wrapper, context=ctx)
    attach(other, lbfgs, context=ctx).detach()  # nothing was begun


@pytest.mark.parametrize("early", [False, True])
@on_ranks(1)
def test_a_hook_of_the_step_is_refused_where_no_rank_has_the_mean(ctx: Any, early: bool) -> None:
    net, optimizer = small()
    with attach(net, optimizer, context=ctx, kind="update", early=early):
        optimizer.register_step_post_hook(lambda *_: None)
        with pytest.raises(pgasdl.errors.ConfigError, match=r'kind="average", or remove'):
            net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
            optimizer.step()


@on_ranks(1)
def test_a_wrong_use_is_refused_before_it_harms(ctx: Any) -> None:
    net, optimizer = small()
    x = torch.ones(1, 4, dtype=torch.float64)
    with attach(net, optimizer, context=ctx) as attached:
        net(x).sum().backward()
        with pytest.raises(pgasdl.PlanError, match=r"2\.\w+ gets another gradient .* no_sync"):
            net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        (x @ net[0].weight.T).sum().backward()  # the step is made before
        optimizer.step()
        for each in net.parameters():
            each.grad = None
        net(x).sum().backward()
        net[0].weight.grad = None
        with pytest.raises(pgasdl.PlanError, match=r"of 0\.weight was removed .* call wait"):
            optimizer.step()
        net[0].weight.register_hook(lambda _: net[2].weight.grad.sum())
        attached.zero_grad()
        with pytest.raises(pgasdl.PlanError, match=r"2\.weight, .* while backward runs"):
            net(x).sum().backward()


def test_a_look_at_what_other_ranks_reached_is_refused() -> None:
    """Ranks that clip by different gradients would part."""

    def program(ctx: Any) -> bool:
        net, optimizer = small()
        x = torch.ones(1, 4, dtype=torch.float64)
        with attach(net, optimizer, context=ctx) as attached:
            (net(x) if ctx.rank else net[0](x)).sum().backward()
            if ctx.rank == 0:
                with pytest.raises(pgasdl.PlanError, match=r"did not reach parameter 2\.weight"):
                    _clip(net)
            attached.wait()
            return float(nn.utils.clip_grad_norm_(net.parameters(), 1.0))

    first, second = loopback.run(2, program)
    assert first == second > 0


def _clip(net: Any) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)


def _clip_values(net: Any) -> None:
    nn.utils.clip_grad_value_(net.parameters(), 0.01)


NOT_ELEMENTWISE = [
    torch.optim.Adafactor,
    torch.optim.LBFGS,
    lambda p: torch.optim.Muon([each for each in p if each.ndim == 2]),
    torch.optim.SparseAdam,
    type("Own", (torch.optim.SGD,), {}),
]


@pytest.mark.parametrize("optimizer_of", NOT_ELEMENTWISE)
@on_ranks(1)
def test_kind_update_refuses_optimizers_that_may_look_at_more(ctx: Any, optimizer_of: Any) -> None:
    net, _ = small()
    optimizer = optimizer_of(list(net.parameters()))
    with pytest.raises(pgasdl.errors.ConfigError, match=r'kind="average" does it; .* AdamW,'):
        attach(net, optimizer, context=ctx, kind="update")
    assert net[0].weight not in ATTACHED


@on_ranks(1)
def test_kind_update_refuses_what_its_plans_cannot_do(ctx: Any) -> None:
    net, optimizer = small()
    with pytest.raises(pgasdl.errors.ConfigError, match="no kind 'mean'"):
        attach(net, optimizer, context=ctx, kind="mean")
    with pytest.raises(pgasdl.errors.ConfigError, match="no candidates"):
        attach(net, optimizer, context=ctx, kind="update", candidates=("tree", "gdraa"))
    with pytest.raises(pgasdl.PlanError, match="staged"):
        attach(net, optimizer, context=ctx, kind="update", plan="staged")


def _wait(attached: Any) -> None:
    attached.wait()


def _clip_norm(attached: Any) -> None:
    _clip(attached.model)


def _scale(attached: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.step(attached.optimizer)


def _unscale(attached: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(attached.optimizer)
    scaler.step(attached.optimizer)


def _change(attached: Any) -> None:
    _clip_values(attached.model)
    attached.optimizer.step()


@pytest.mark.parametrize("use", [_wait, _clip_norm, _scale, _unscale, _change])
def test_kind_update_has_no_mean_gradient(use: Callable[..., None]) -> None:
    def program(ctx: Any) -> bool:
        net, optimizer = small()
        net.float()
        with (
            pytest.raises((pgasdl.errors.ConfigError, pgasdl.PlanError), match='kind="average"'),
            attach(net, optimizer, context=ctx, kind="update") as attached,
        ):
            net(torch.ones(1, 4)).sum().backward()
            use(attached)
        return not hasattr(optimizer, "_step_supports_amp_scaling")

    assert loopback.run(2, program) == [True, True]


@on_ranks(1)
def test_kind_update_uses_a_gradient_up(ctx: Any) -> None:
    net, optimizer = small()
    x = torch.ones(1, 4, dtype=torch.float64)
    with attach(net, optimizer, context=ctx, kind="update") as attached:
        losses = net(x).sum(), net(x).sum()
        losses[0].backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[1].backward()  # its peers may have new weights in place of these
        optimizer.step()
        with pytest.raises(pgasdl.PlanError, match=r"2\.\w+ gets another .*zero_grad\(\)"):
            net(x).sum().backward()
        with pytest.raises(pgasdl.PlanError, match=r"0\.weight, .*zero_grad\(\) after each"):
            attached.synchronize()
            optimizer.step()
        for each in net.parameters():
            each.grad = None  # does it, too
        before = net[2].bias.detach().clone()
        with attached.no_sync():
            net(x).sum().backward()
        net(x).sum().backward()
        optimizer.step()
        attached.synchronize()
        assert torch.equal(net[2].bias, before - 0.2)


@pytest.mark.parametrize("use", ["call", "state_dict", "optimizer.state_dict", "synchronize"])
@on_ranks(1)
def test_kind_update_keeps_weights_to_itself_between_backward_and_step(ctx: Any, use: str) -> None:
    net, optimizer = small()
    x = torch.ones(1, 4, dtype=torch.float64)
    with attach(net, optimizer, context=ctx, kind="update") as attached:
        uses = {
            "call": lambda: net(x),
            "state_dict": net.state_dict,
            "optimizer.state_dict": optimizer.state_dict,
            "synchronize": attached.synchronize,
        }
        net(x).sum().backward()
        with pytest.raises(pgasdl.PlanError, match=r"0\.weight.* used between backward and"):
            uses[use]()
        optimizer.step()
        uses[use]()


@on_ranks(1)
def test_a_parameter_that_was_moved_is_noticed(ctx: Any) -> None:
    net, optimizer = small()
    with attach(net, optimizer, context=ctx, kind="update"):
        net[2].bias.data = net[2].bias.data.clone()
        net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        with pytest.raises(pgasdl.PlanError, match=r"2\.bias has got other memory"):
            optimizer.step()
        optimizer.zero_grad()


@on_ranks(1)
def test_a_fused_optimizer_that_scales_itself_steps_at_once(ctx: Any) -> None:
    net, _ = small()
    net.float()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, fused=True)
    before = net[2].bias.detach().clone()
    for deferred in (None, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with attach(net, optimizer, context=ctx, deferred=deferred) as attached:
            scaler.scale(net(torch.ones(1, 4)).sum()).backward()
            attached.wait()
            if deferred is None:
                with pytest.raises(pgasdl.errors.ConfigError, match="deferred=False"):
                    scaler.step(optimizer)
                del optimizer.grad_scale, optimizer.found_inf
            else:
                scaler.step(optimizer)
    torch.testing.assert_close(net[2].bias.detach(), before - 0.1)


@kinds
@pytest.mark.parametrize("net_of", [lambda: nn.LazyLinear(2), nn.LazyBatchNorm1d])
@on_ranks(1)
def test_a_lazy_module_is_refused(ctx: Any, net_of: Callable[[], Any], kind: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), net_of())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(pgasdl.BufferRefusedError, match=r"1\.weight has no shape yet: call the"):
        attach(net, optimizer, context=ctx, kind=kind)
    net(torch.ones(2, 4))
    with attach(net, optimizer, context=ctx, kind=kind):
        pass


@kinds
@on_ranks(1)
def test_a_sparse_gradient_is_refused(ctx: Any, kind: str) -> None:
    net = nn.Embedding(5, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with attach(net, optimizer, context=ctx, kind=kind):
        net.sparse = True
        with pytest.raises(
            pgasdl.BufferRefusedError, match=r"weight gets a sparse .* sparse=False"
        ):
            net(torch.tensor([1, 2])).sum().backward()
        net.sparse = False
        net(torch.tensor([1, 2])).sum().backward()
        optimizer.step()


@kinds
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@on_ranks(1)
def test_scripted_code_is_refused(ctx: Any, kind: str) -> None:
    """But for what is not trained, and of copies."""
    net, optimizer = small()
    x = torch.ones(1, 4, dtype=torch.float64)
    for scripted in (torch.jit.script(net), torch.jit.trace(net, x)):
        with pytest.raises(pgasdl.errors.ConfigError, match=r"0\.weight is used by scripted"):
            attach(scripted, optimizer, context=ctx, kind=kind)
    both = nn.Sequential(torch.jit.script(nn.Linear(4, 4).double().requires_grad_(False)), net)
    with attach(both, optimizer, context=ctx, kind=kind):
        with pytest.raises(pgasdl.errors.ConfigError, match=r"script a copy\.deepcopy"):
            torch.jit.script(net)
        both(x).sum().backward()
        optimizer.step()
        assert torch.equal(torch.jit.script(copy.deepcopy(net))(x), net(x))
    torch.jit.script(net)


@kinds
@on_ranks(1)
def test_a_model_that_is_converted_is_refused(ctx: Any, kind: str) -> None:
    net, optimizer = small()
    refused = pytest.raises(pgasdl.PlanError, match=r"float32 on cpu now, .*float64 .* detach")
    with attach(net, optimizer, context=ctx, kind=kind):
        net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        net.float()
        with refused:
            net(torch.ones(1, 4)).sum().backward()
    with attach(net, optimizer, context=ctx, kind=kind):
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()


@kinds
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_a_graph_belongs_into_no_sync(kind: str) -> None:
    """A penalty on the gradients, of which every rank computes its own."""

    def made() -> Any:
        net = made_small(1)
        return net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def loss_of(net: Any, rows: Any) -> Any:
        x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
        return net(x[rows]).square().mean()

    def backward(net: Any, local: Any, rows: Any) -> None:
        with local:
            loss_of(net, rows).backward(create_graph=True)
        sum(each.grad.square().sum() for each in net.parameters()).backward()

    def program(ctx: Any) -> Any:
        net, optimizer = made()
        with attach(net, optimizer, context=ctx, kind=kind) as attached:
            for _ in range(2):
                with pytest.raises(pgasdl.PlanError, match=r"has a graph, .* no_sync"):
                    loss_of(net, slice(4)).backward(create_graph=True)
                optimizer.zero_grad()
                rows = slice(2 * ctx.rank, 2 * ctx.rank + 2)
                backward(net, attached.no_sync(), rows)
                optimizer.step()
                optimizer.zero_grad()
        return net

    plain, optimizer = made()
    for _ in range(2):
        gradients = []
        for rank in range(2):
            backward(plain, contextlib.nullcontext(), slice(2 * rank, 2 * rank + 2))
            gradients.append([each.grad.detach().clone() for each in plain.parameters()])
            plain.zero_grad()
        for each, *both in zip(plain.parameters(), *gradients, strict=True):
            each.grad = sum(both) / 2
        optimizer.step()
        optimizer.zero_grad()
    for net in loopback.run(2, program):
        same(net, plain)


def test_gradients_that_the_program_moves_are_exchanged() -> None:
    """By an assignment to their data."""

    def program(ctx: Any) -> Any:
        net, optimizer = small()
        with attach(net, optimizer, context=ctx):
            for step in range(3):
                net(torch.full((1, 4), step + ctx.rank, dtype=torch.float64)).sum().backward()
                for each in net.parameters():
                    each.grad.data = each.grad.data / 2
                optimizer.step()
                optimizer.zero_grad(set_to_none=step == 0)
        return net

    first, second = loopback.run(2, program)
    assert bits(first) == bits(second)
