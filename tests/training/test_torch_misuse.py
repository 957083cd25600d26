"""``pgasdl.torch.attach`` refuses what cannot be attached, and a wrong use before it harms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_tools import alone, small  # noqa: E402

import pgasdl  # noqa: E402
from pgasdl.torch import attach  # noqa: E402


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
    def program(ctx: Any) -> bool:
        net, optimizer = small()
        net.float()
        right = False
        with (
            pytest.raises(pgasdl.PlanError, match=r"0\.weight.* before you clip"),
            attach(net, optimizer, context=ctx) as attached,
        ):
            net(torch.ones(1, 4)).sum().backward()
            attached.wait()
            change(net)
            optimizer.step()
            attached.synchronize()
            right = True
            optimizer.zero_grad()
            net(torch.ones(1, 4)).sum().backward()
            change(net)
            optimizer.step()
            net(torch.ones(1, 4))
        return right

    assert alone(program)
