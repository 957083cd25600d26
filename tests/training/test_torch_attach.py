"""``pgasdl.torch.attach`` in both kinds: several ranks train the model of one process."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
from support.ranks import on_ranks
from tiers import full

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_tools import (  # noqa: E402
    STEPS,
    adamw,
    alone,
    bits,
    loss_of,
    made,
    made_small,
    reference,
    same,
    sgd,
    small,
)

from pgasdl import loopback  # noqa: E402
from pgasdl.torch import attach  # noqa: E402

kinds = pytest.mark.parametrize("kind", ["average", "update"])
WAYS: list[dict[str, Any]] = [
    {},
    {"bucket_bytes": 1 << 20},
    {"deferred": False},
    {"kind": "update", "plan": "gdraa-direct"},
    {"kind": "update", "plan": "tree"},
    {"kind": "update", "plan": "gdraa", "bucket_bytes": 1 << 20},
    {"kind": "update", "plan": "tree", "bucket_bytes": 1 << 10, "rotate_root": True},
    {"kind": "update", "early": True},
    {"kind": "update", "early": True, "plan": "tree", "bucket_bytes": 1 << 10},
    {"kind": "update", "early": True, "plan": "gdraa", "deferred": False},
    {"kind": "update", "deferred": False},
]


def train(ctx: Any, optimizer_of: Callable[..., Any], **options: Any) -> Any:
    net = made(seed=ctx.rank)  # the others get rank 0's
    optimizer, scheduler = optimizer_of(net)
    with attach(net, optimizer, context=ctx, **options):
        for step in range(STEPS):
            loss_of(net, step, ctx.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return net, optimizer


def _drawn(seed: int) -> dict[str, Any]:
    return {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}


@pytest.mark.parametrize("optimizer_of", [sgd, adamw])
@pytest.mark.parametrize("options", full(WAYS, quick=6), ids=str)
@pytest.mark.parametrize("size", full([3, 2, 4], quick=1))
def test_ranks_train_the_model_of_one_process(
    size: int, options: dict[str, Any], optimizer_of: Callable[..., Any]
) -> None:
    """Frozen, tied, and rarely or never used parameters included."""
    expected = reference(size, optimizer_of)
    results = loopback.run(size, lambda ctx: train(ctx, optimizer_of, **options))
    for net, _ in results:
        same(net, expected)
        assert bits(net) == bits(results[0][0])


@kinds
def test_an_unused_parameter_is_left_alone(kind: str) -> None:
    """By weight decay and momentum too, whichever rank owns it, as where its gradient is None."""
    start = made()
    options = {"kind": kind, "plan": "gdraa", "bucket_bytes": 1 << 20}
    for net, optimizer in loopback.run(3, lambda ctx: train(ctx, adamw, **options)):
        assert torch.equal(net.never.weight, start.never.weight)
        assert net.never.weight not in optimizer.state
        assert not torch.equal(net.rare.weight, start.rare.weight)
        assert optimizer.state[net.rare.weight]["step"] == STEPS - 2


@pytest.mark.parametrize("deferred", [None, False])
def test_a_closure_is_called_before_the_step(deferred: bool | None) -> None:
    def program(ctx: Any) -> Any:
        net = made()
        optimizer, scheduler = adamw(net)
        with attach(net, optimizer, context=ctx, deferred=deferred), torch.no_grad():
            for step in range(STEPS):

                def closure(step: int = step) -> Any:
                    optimizer.zero_grad()
                    loss = loss_of(net, step, ctx.rank)
                    loss.backward()
                    return loss

                assert optimizer.step(closure) > 0
                scheduler.step()
        return net

    for net in loopback.run(2, program):
        same(net, reference(2, adamw))


@pytest.mark.parametrize(
    ("options", "hooked"),
    [({}, False), ({}, True), ({"deferred": False}, False), ({"kind": "update"}, False)],
)
def test_gradients_add_up_and_are_clipped(options: dict[str, Any], hooked: bool) -> None:
    """The mean gradient is, also by a hook of the step: kind "update" has none."""
    clip = None if options.get("kind") == "update" else 0.5

    def program(ctx: Any) -> Any:
        net = made()
        optimizer, scheduler = sgd(net)
        if hooked:
            clips = functools.partial(nn.utils.clip_grad_norm_, max_norm=clip)
            optimizer.register_step_pre_hook(lambda *_: clips(net.parameters()) and None)
        with attach(net, optimizer, context=ctx, **options) as attached:
            for step in range(STEPS):
                optimizer.zero_grad()
                with attached.no_sync():
                    loss_of(net, step, ctx.rank, 0).backward()
                loss_of(net, step, ctx.rank, 1).backward()
                if clip and not hooked:
                    attached.wait()  # as not every rank's backward reaches all
                    assert nn.utils.clip_grad_norm_(net.parameters(), clip) > 0
                optimizer.step()
                scheduler.step()
        return net

    expected = reference(2, sgd, parts=2, clip=clip)
    for net in loopback.run(2, program):
        same(net, expected)


@on_ranks(1)
def test_gradients_lie_in_the_exchange_as_the_parameters_do(ctx: Any) -> None:
    net = made().to(memory_format=torch.channels_last)
    optimizer, _ = sgd(net)
    with attach(net, optimizer, context=ctx) as attached:
        memory = attached.exchange.gradients.torch()
        first, last = memory.data_ptr(), memory.data_ptr() + memory.numel()
        places = set()
        for set_to_none in (True, False, True):
            loss_of(net, 0, 0).backward()
            optimizer.step()
            unused = {*net.never.parameters(), *net.rare.parameters()}
            trained = [p for p in net.parameters() if p.requires_grad and p not in unused]
            assert all(first <= each.grad.data_ptr() < last for each in trained)
            places.add(tuple(each.grad.data_ptr() for each in trained))
            assert net.conv.weight.grad.stride() == net.conv.weight.stride() != (18, 9, 3, 1)
            net.zero_grad(set_to_none)
            attached.synchronize()
            assert all((each.grad is None) == set_to_none for each in trained)
            assert set_to_none or not any(each.grad.any() for each in trained)
        assert len(places) == 1
    assert all(each.grad is None for each in net.parameters())


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
        return gradients

    assert all(gradient.abs().sum() > 0 for gradient in alone(program))


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes_and_a_narrow_wire(dtype: Any, kind: str) -> None:
    def program(ctx: Any) -> Any:
        net = nn.Linear(4, 2).to(dtype)
        with torch.no_grad():
            for each in net.parameters():
                each.fill_(0.5)
        optimizer = torch.optim.SGD(net.parameters(), 1)
        wire = "bfloat16" if dtype is torch.float32 else None
        plan = "gdraa" if wire and kind == "update" else None
        with attach(net, optimizer, context=ctx, kind=kind, wire=wire, plan=plan):
            net(torch.full((1, 4), ctx.rank, dtype=dtype)).sum().backward()
            optimizer.step()
        return net

    for net in loopback.run(2, program):
        assert (net.weight == 0).all() and (net.bias == -0.5).all()


@kinds
def test_two_models_in_one_process(kind: str) -> None:
    def program(ctx: Any) -> Any:
        (one, first), (two, second) = small(), small(momentum=0.5)
        x = torch.full((2, 4), 1.0 + ctx.rank, dtype=torch.float64)
        with (
            attach(one, first, context=ctx, kind=kind),
            attach(two, second, context=ctx, kind=kind, plan="tree"),
        ):
            for _ in range(3):
                (one(x).sum() + two(x).sum()).backward()
                for optimizer in (second, first):
                    optimizer.step()
                    optimizer.zero_grad()
        return bits(one), bits(two)

    ours, theirs = loopback.run(2, program)
    assert ours == theirs


@kinds
def test_state_is_what_it_is_without(kind: str) -> None:
    """Steps that are due are made first; one process, or another number of ranks, goes on."""

    def first(ctx: Any) -> Any:
        net = made()
        optimizer, scheduler = adamw(net)
        with attach(net, optimizer, context=ctx, kind=kind, plan="gdraa"):
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
            optimizer.load_state_dict(copy.deepcopy(saved[1]))  # PyTorch's takes it as it is
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
    for size, other in ((1, "average"), (2, "update"), (4, "update")):
        for net in loopback.run(size, lambda ctx, other=other: second(ctx, saved, other)):
            same(net, plain)


def test_a_parameter_without_elements_has_its_state() -> None:
    def program(ctx: Any) -> Any:
        net = nn.Linear(3, 2)
        net.none = nn.Parameter(torch.empty(2, 0))
        optimizer = torch.optim.Adam(net.parameters())
        with attach(net, optimizer, context=ctx, kind="update"):
            for _ in range(2):
                (net(torch.ones(3)).sum() + net.none.sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
            return copy.deepcopy(optimizer.state_dict()["state"])

    for state in loopback.run(2, program):
        assert sorted(state) == [0, 1, 2]
        assert {each["step"].item() for each in state.values()} == {2}
        assert state[2]["exp_avg"].shape == (2, 0)


@on_ranks(1)
def test_the_end_gives_back_what_was_there(ctx: Any) -> None:
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


@kinds
@pytest.mark.parametrize("first", ["compile", "attach"])
def test_a_compiled_model(first: str, kind: str) -> None:
    def program(ctx: Any) -> Any:
        net = made()
        compiled = torch.compile(net, backend="eager")
        optimizer, _ = sgd(net)
        given = compiled if first == "compile" else net
        with attach(given, optimizer, context=ctx, kind=kind):
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


@kinds
@pytest.mark.parametrize("what", ["step", "end", "iteration"])
def test_compiled_parts_of_a_loop(what: str, kind: str) -> None:
    """PyTorch's recipe for a compiled optimizer, and functions that call backward, too."""

    def train(net: Any, optimizer: Any, compile: Callable[[Any], Any]) -> None:
        def backward(step: int) -> None:
            loss_of(net, step, 0).backward()

        def one_step() -> None:
            optimizer.step()

        def end() -> None:
            optimizer.step()
            optimizer.zero_grad()

        def iteration(step: int) -> None:
            backward(step)
            end()

        for step in range(3):
            if what == "iteration":
                compile(iteration)(step)
                continue
            backward(step)
            compile(end if what == "end" else one_step)()
            optimizer.zero_grad()

    def program(ctx: Any) -> Any:
        net = made()
        optimizer, _ = adamw(net)
        with attach(net, optimizer, context=ctx, kind=kind):
            train(net, optimizer, lambda function: torch.compile(function, backend="eager"))
        return net

    plain = made()
    train(plain, adamw(plain)[0], lambda function: function)
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


@kinds
def test_a_parameter_may_leave_its_group_and_come_back(kind: str) -> None:
    def train(net: Any, *kinds_of_it: str, context: Any = None) -> Any:
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        (group,) = optimizer.param_groups
        with contextlib.ExitStack() as stack:
            for each in kinds_of_it:
                stack.enter_context(attach(net, optimizer, context=context, kind=each))
            for step in range(5):
                net(torch.full((2, 4), 0.1 * step, dtype=torch.float64)).square().sum().backward()
                optimizer.step()
                net.zero_grad()
                if step == 1:
                    left = [group["params"].pop(0), group["params"].pop()]
                elif step == 3:
                    optimizer.add_param_group({"params": left, "lr": 0.01})
        return net

    expected = train(made_small(1))
    for net in loopback.run(2, lambda ctx: train(made_small(1), kind, context=ctx)):
        same(net, expected)


@kinds
@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
def test_a_step_may_be_left_out(bucket_bytes: int, kind: str) -> None:
    """By all ranks: its gradients are forgotten."""

    def program(ctx: Any) -> Any:
        net = made()
        optimizer, scheduler = sgd(net)
        options = {"kind": kind, "bucket_bytes": bucket_bytes, "plan": "gdraa"}
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


@on_ranks(1)
def test_a_copy_is_not_attached(ctx: Any) -> None:
    """As for an average of weights over time."""
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


@on_ranks(1)
def test_a_pickle_is_not_attached(ctx: Any) -> None:
    net, optimizer = small(momentum=0.9)
    x = torch.ones(1, 4, dtype=torch.float64)
    with attach(net, optimizer, context=ctx):
        net(x).sum().backward()
        optimizer.step()
        file = io.BytesIO()
        torch.save((net, optimizer), file)
        file.seek(0)
        copied, its = torch.load(file, weights_only=False)
        assert torch.equal(copied(x), net(x))
        assert "zero_grad" not in vars(copied) and not copied[0]._forward_pre_hooks
        assert len(its.state) == 4
        with attach(copied, its, context=ctx):
            pass


@on_ranks(1)
def test_two_optimizers_of_one_model(ctx: Any) -> None:
    net, _ = small()
    first, second = (torch.optim.SGD(net[n].parameters(), 0.1) for n in (0, 2))
    with attach(net, first, context=ctx), attach(net, second, context=ctx):
        for _ in range(3):
            net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
            first.step()
            second.step()
            net.zero_grad()
            assert all(each.grad is None for each in net.parameters())
    assert not {"zero_grad", "__getstate__"} & set(vars(net))


def test_two_models_that_teach_each_other() -> None:
    """A GAN: the generator's loss goes through the discriminator, whose gradient is dropped."""

    def iterations(discriminator: Any, generator: Any, both: Any, part: Any) -> None:
        for step in range(STEPS):
            real, noise = (each[part] for each in torch.rand(2, 4, 4, **_drawn(step)))
            both[0].zero_grad()
            loss = discriminator(generator(noise).detach()).mean() - discriminator(real).mean()
            loss.backward()
            both[0].step()
            both[1].zero_grad()
            discriminator(generator(noise)).square().mean().backward()
            both[1].step()

    def pair() -> tuple[Any, ...]:
        models = made_small(1), made_small(2)
        return *models, [torch.optim.Adam(each.parameters(), 0.01) for each in models]

    def program(ctx: Any) -> Any:
        first, second, both = pair()
        with attach(first, both[0], context=ctx), attach(second, both[1], context=ctx):
            iterations(first, second, both, slice(2 * ctx.rank, 2 * ctx.rank + 2))
        return nn.ModuleList([first, second])

    first, second, both = pair()
    iterations(first, second, both, slice(4))
    for models in loopback.run(2, program):
        same(models, nn.ModuleList([first, second]))


class Sharpness(torch.optim.Optimizer):
    """SAM: steps with the gradient of weights that the first gradient has moved."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, 0.1, momentum=0.9)
        self.param_groups = self.base.param_groups
        self._kept: list[Any] = []

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        self._kept = [each.data.clone() for each in parameters]
        for each in parameters:
            each.add_(each.grad * 0.05 / norm)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for each, kept in zip(self.param_groups[0]["params"], self._kept, strict=True):
            each.data = kept
        self.base.step()
        self.zero_grad()


@pytest.mark.parametrize("attached", ["base", "itself"])
def test_an_optimizer_of_two_steps(attached: str) -> None:
    def iterations(net: Any, optimizer: Any, part: Any) -> None:
        for step in range(STEPS):
            x = torch.rand(4, 4, **_drawn(step))[part]
            net(x).square().mean().backward()
            optimizer.first_step()
            net(x).square().mean().backward()
            optimizer.second_step()

    def program(ctx: Any) -> Any:
        net = made_small(1)
        optimizer = Sharpness(net.parameters())
        with attach(net, optimizer.base if attached == "base" else optimizer, context=ctx):
            iterations(net, optimizer, slice(2 * ctx.rank, 2 * ctx.rank + 2))
        return net

    expected = made_small(1)
    iterations(expected, Sharpness(expected.parameters()), slice(4))
    for net in loopback.run(2, program):
        same(net, expected)


@on_ranks(1)
def test_an_error_ends_it_at_once(ctx: Any) -> None:
    """Without the steps that are due; model and optimizer can be attached again."""
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
