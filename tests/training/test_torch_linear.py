"""Wide layers that are spread over ranks: the gradients are those of one process."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jobs
import numpy
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import pgasdl  # noqa: E402
import pgasdl.matrix  # noqa: E402
import pgasdl.torch  # noqa: E402
from pgasdl import loopback  # noqa: E402
from pgasdl.torch import DistributedLinear  # noqa: E402

UNMAPPED = {"mapped": False, "seed": 1, "delay": 1, "reorder": True, "late_source": True}


def network(dtype: Any) -> nn.Sequential:
    """Two wide layers, one of them without a bias."""
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 7, bias=False))
    return made.to(dtype)


def losses(model: nn.Module, x: Any, y: Any, n: int = 4) -> list[float]:
    """Of a few steps of Adam on a batch, or this rank's share of one."""
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    found = []
    for _ in range(n):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        found.append(loss.item())
        optimizer.step()
    return found


@pytest.mark.parametrize("layouts", [("rows", "columns"), ("grid", "cyclic")])
@pytest.mark.parametrize("transport", [{}, UNMAPPED], ids=["mapped", "unmapped"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_train_as_one_process(
    size: int, transport: dict[str, Any], layouts: tuple[str, str]
) -> None:
    dtype = torch.float64
    dice = torch.Generator().manual_seed(2)
    x, y = (torch.randn(size, 5, n, dtype=dtype, generator=dice) for n in (12, 7))
    alone = network(dtype)
    due = losses(alone, x, y)  # of more than two dimensions, too

    def program(ctx: Any) -> tuple[list[float], list[Any]]:
        ctx.pool(1 << 20)
        model = made[ctx.rank]
        for place, layout in zip((0, 2), layouts, strict=True):
            model[place] = DistributedLinear(ctx, model[place], layout)
        here = x[ctx.rank].clone().requires_grad_()
        found = losses(model, here, y[ctx.rank])
        weights = [torch.from_numpy(model[place].matrix.everywhere().copy()) for place in (0, 2)]
        return found, [*weights, model[0].bias.detach(), here.grad]

    made = [network(dtype) for _ in range(size)]  # not in threads: they share torch's seed
    results = loopback.run(size, program, **transport)
    for step, loss in enumerate(due):
        mean = sum(found[step] for found, _ in results) / size
        assert mean == pytest.approx(loss, rel=1e-12)
    for _, (first, last, bias, of_inputs) in results:
        torch.testing.assert_close(first, alone[0].weight.detach(), rtol=0, atol=1e-11)
        torch.testing.assert_close(last, alone[2].weight.detach(), rtol=0, atol=1e-11)
        torch.testing.assert_close(bias, alone[0].bias.detach(), rtol=0, atol=1e-11)
        assert of_inputs.abs().sum() > 0


def test_backward_moves_no_inputs_again() -> None:
    """They came by in forward; of the gradient of the outputs, each rank gets the rest once."""
    torch.manual_seed(1)
    layer = nn.Linear(512, 256, dtype=torch.float64)

    def program(ctx: Any) -> tuple[int, int]:
        ctx.pool(4 << 20)
        model = DistributedLinear(ctx, layer)
        x = torch.ones(4, 512, dtype=torch.float64, requires_grad=True)
        before = ctx.counters()
        loss = model(x).sum()
        between = ctx.counters()
        loss.backward()
        moved = between - before, ctx.counters() - between
        forward, backward = (each.total.bytes_read + each.total.bytes_written for each in moved)
        return forward, backward

    inputs, outputs = 4 * 512 * 8, 4 * 256 * 8
    for forward, backward in loopback.run(2, program, mapped=False):
        assert forward == inputs + outputs // 2  # the other's inputs, and its part of the outputs
        # The other's gradients of outputs, and its products for the gradient of this one's inputs.
        # Those of the bias come with what ranks tell each other in a collective.
        assert backward == outputs + inputs


def test_wrong_inputs_are_refused() -> None:
    layer = nn.Linear(4, 3)

    def program(ctx: Any) -> None:
        model = DistributedLinear(ctx, layer)
        assert "in_features=4, out_features=3, bias=True" in repr(model)
        with pytest.raises(
            pgasdl.BufferRefusedError, match=r"layer of torch.float32 with 4 inputs"
        ):
            model(torch.ones(2, 5))
        with pytest.raises(
            pgasdl.BufferRefusedError, match=r"layer of torch.float32 with 4 inputs"
        ):
            model(torch.ones(2, 4, dtype=torch.float64))
        with pytest.raises(pgasdl.BufferRefusedError, match="of float32 or float64"):
            DistributedLinear(ctx, nn.Linear(4, 3, dtype=torch.float16))
        (gradient,) = torch.autograd.grad(
            model(torch.ones(2, 4)).square().sum(), model.weight, create_graph=True
        )
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(pgasdl.ConfigError, match="exchanges its own gradients"):
            pgasdl.torch.attach(nn.Sequential(model), optimizer, context=ctx)
        found = model(torch.ones(2, 4, requires_grad=True))
        with torch.no_grad():
            model.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            found.sum().backward()
        x = torch.ones(2 + ctx.rank, 4)
        with pytest.raises(pgasdl.MismatchError):
            model(x)

    loopback.run(2, program)


def test_a_weight_that_has_other_memory_is_used() -> None:
    """After double(), assigned data or a deep copy; also on a rank that has none of it."""
    torch.manual_seed(3)
    layer, other = nn.Linear(4, 1), nn.Linear(4, 1, dtype=torch.float64)

    def program(ctx: Any) -> None:
        model = DistributedLinear(ctx, layer).double()
        due = copy.deepcopy(layer).double()
        x = torch.ones(2, 4, dtype=torch.float64)
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, due)]
        for _ in range(2):
            for each, optimizer in zip((model, due), optimizers, strict=True):
                optimizer.zero_grad()
                each(x).square().sum().backward()
                optimizer.step()
            torch.testing.assert_close(model(x), due(x))
        copied = copy.deepcopy(model)
        mine = model.weight.numel()
        model.weight.data = other.weight.detach().view(-1)[:mine].clone()
        model.bias.data = other.bias.detach().clone()
        torch.testing.assert_close(model(x), other(x))
        torch.testing.assert_close(copied(x), due(x))
        model.weight.data = torch.ones(mine + 1, dtype=torch.float64)
        with pytest.raises(pgasdl.BufferRefusedError, match=f"this rank has {mine} of"):
            model(x)
        with pytest.raises(pgasdl.BufferRefusedError, match="of float32 or float64"):
            model.half()(x.half())

    loopback.run(2, program)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"norm_type": math.inf}], ids=str)
def test_gradients_are_clipped_by_the_norm_of_all(options: dict[str, Any]) -> None:
    """The same on all ranks, also where one has no part of a weight; Adam's steps are the same."""
    torch.manual_seed(5)
    layers = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))
    x = torch.randn(3, 6)

    def clipped(model: nn.Module) -> tuple[float, list[Any]]:
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (30 * model(x)).square().sum().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, **options)
            optimizer.step()
        return norm.item(), [each.bias.detach() for each in model]

    due, biases = clipped(copy.deepcopy(layers))

    def program(ctx: Any) -> None:
        assigned = nn.Sequential(*(DistributedLinear(ctx, each) for each in layers))
        assigned.load_state_dict(assigned.state_dict(), assign=True)
        for model in (
            nn.Sequential(*(DistributedLinear(ctx, each) for each in layers)),
            copy.deepcopy(nn.Sequential(*(DistributedLinear(ctx, each) for each in layers))),
            assigned,
        ):
            norm, found = clipped(model)
            assert norm == pytest.approx(due, rel=1e-5)
            torch.testing.assert_close(found, biases)
            with pytest.raises(ValueError, match="spread over ranks: above 0"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=-math.inf)

    loopback.run(2, program)


NORMS = [
    torch.norm,
    torch.linalg.norm,
    torch.linalg.vector_norm,
    lambda g: g.norm(),
    lambda g: g.norm(p=1),
    lambda g: torch.linalg.norm(g, math.inf, dtype=torch.float64),
    lambda g: g.data.norm(2),
    lambda g: g.detach().double().norm(),
    lambda g: torch.norm(g.clone(), "fro", dim=None),
    lambda g: copy.deepcopy(g).norm(),
]


def test_every_norm_of_a_gradient_is_of_all_parts() -> None:
    torch.manual_seed(6)
    layer, x = nn.Linear(6, 5), torch.randn(3, 6)
    alone = copy.deepcopy(layer)
    alone(x).square().sum().backward()

    def program(ctx: Any) -> None:
        model = DistributedLinear(ctx, layer)
        model(x).square().sum().backward()
        gradient = model.weight.grad
        for norm in NORMS:
            due, found = norm(alone.weight.grad.view(-1)), norm(gradient)
            torch.testing.assert_close(found, due)
            assert type(found) is torch.Tensor
        assert type(pickle.loads(pickle.dumps(gradient.clone()))) is torch.Tensor
        for wrong in ({"dim": 0}, {"keepdim": True}, {"dim": 0, "p": 1}):
            with pytest.raises(ValueError, match="is one number of all"):
                gradient.norm(**wrong)
        with pytest.raises(ValueError, match="norm nuc of a gradient"):
            gradient.norm("nuc")

    loopback.run(2, program)


def test_distributed_data_parallel_leaves_it_alone(
    forked: Callable[..., str], tmp_path: Path
) -> None:
    """It gave all ranks the block of rank 0."""
    shown = forked(2, jobs.PROGRAMS / "ddp_linear.py", tmp_path / "store")
    assert shown.count("is right") == 2


@pytest.mark.parametrize("transport", [{}, UNMAPPED], ids=["mapped", "unmapped"])
def test_the_matrix_is_the_weight_as_it_is_now(transport: dict[str, Any]) -> None:
    """After a step, loading, assigning and double(), also on a rank that has none of it."""
    torch.manual_seed(7)
    layers = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))

    def program(ctx: Any) -> None:
        pgasdl.matrix.keep(ctx, 1 << 20)
        if transport:
            ctx.pool(1 << 20)
        model = nn.Sequential(*(DistributedLinear(ctx, each) for each in layers))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def look() -> list[Any]:
            found = []
            for layer in model:
                whole = torch.from_numpy(layer.matrix.everywhere().copy())
                mine = torch.from_numpy(layer.matrix.remap("rows").flat)
                assert torch.equal(mine, layer.weight.detach())
                product = layer.matrix @ numpy.eye(layer.in_features, dtype=whole.numpy().dtype)
                assert torch.equal(torch.from_numpy(numpy.asarray(product)), whole)
                found.append(whole)
            return found

        seen = [look()]
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        seen.append(look())
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
        seen.append(look())
        model.double()
        seen.append(look())
        for before, after in pairwise(seen[:3]):
            for one, other in zip(before, after, strict=True):
                assert (one != other).all()
        assert seen[3][0].dtype == torch.float64
        torch.testing.assert_close(seen[3], [each.double() for each in seen[2]], rtol=0, atol=0)

    loopback.run(2, program, **transport)


def test_a_copy_that_was_never_used_has_norms() -> None:
    layer = nn.Linear(4, 6)

    def program(ctx: Any) -> None:
        model = DistributedLinear(ctx, layer)
        copied = copy.deepcopy(model)
        copied.weight.grad = torch.ones_like(copied.weight)
        assert nn.utils.clip_grad_norm_([copied.weight], 1.0).item() == pytest.approx(24**0.5)

    loopback.run(2, program)
