"""A step that is due is made by the next use of a parameter, outside of that use's modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_tools import alone, made_small  # noqa: E402

from pgasdl import loopback  # noqa: E402
from pgasdl.torch import attach  # noqa: E402


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not getattr(func, "__name__", "").endswith("_"), func
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not func._schema.is_mutable, func
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def _fake(net: Any, x: Any) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        net(mode.from_tensor(x))


def _trace(net: Any, x: Any) -> None:
    assert not any(node.kind().endswith("_") for node in torch.jit.trace(net, x).graph.nodes())


def _fx(net: Any, x: Any) -> None:
    assert "add_" not in make_fx(net, pre_dispatch=True)(x).code


def within(mode: Callable[[], Any]) -> Callable[[Any, Any], None]:
    def use(net: Any, x: Any) -> None:
        with mode():
            net(x)

    return use


LOCAL: dict[str, Callable[[Any, Any], None]] = {
    "inference": within(torch.inference_mode),
    "no_grad": within(torch.no_grad),
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "device": within(lambda: torch.device("meta")),
    "functions": within(Functions),
    "operations": within(Operations),
    "fake": _fake,
    "jacrev": lambda net, x: torch.func.jacrev(net)(x[0]),
    "vmap": lambda net, x: torch.vmap(net)(x),
}
OF_THE_PROCESS: dict[str, Callable[[Any, Any], None]] = {
    "default dtype": within(default_dtype),
    "deterministic": within(deterministic),
    "hessian": lambda net, x: torch.func.hessian(lambda x: net(x).sum())(x[0]),
    "trace": _trace,
    "make_fx": _fx,
}


def train(ctx: Any, use: Callable[[Any, Any], None], **options: Any) -> Any:
    net = made_small(1).float()
    optimizer = torch.optim.NAdam(net.parameters(), 0.05)
    x = torch.linspace(-1, 1, 12).view(3, 4)
    with attach(net, optimizer, context=ctx, **options) as attached:
        for step in range(4):
            net(x * step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            use(net, x)
            attached.synchronize()
        states = list(optimizer.state_dict()["state"].values())
    assert not any(each.is_inference() for state in states for each in state.values())
    return states, [each.detach() for each in net.parameters()]


def _no_use(net: Any, x: Any) -> None:
    pass


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use", LOCAL | OF_THE_PROCESS)
def test_a_due_step_leaves_the_modes_of_its_caller(use: str) -> None:
    expected = alone(lambda ctx: train(ctx, _no_use))
    found = alone(lambda ctx: train(ctx, (LOCAL | OF_THE_PROCESS)[use]))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("use", LOCAL)
def test_owners_leave_the_modes_of_whoever_lets_them_step(use: str) -> None:
    expected = loopback.run(2, lambda ctx: train(ctx, _no_use, kind="update"))
    found = loopback.run(2, lambda ctx: train(ctx, LOCAL[use], kind="update"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_due_step_has_the_settings_of_its_moment() -> None:
    """As an optimizer of one's own may go by them."""
    seen = []

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            seen.append(torch.is_grad_enabled())
            super().step()

    def program(ctx: Any) -> None:
        net = made_small(1)
        optimizer = Own(net.parameters(), 0.1)
        with attach(net, optimizer, context=ctx, deferred=True):
            for enabled in (False, True):
                net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
                with torch.set_grad_enabled(enabled):
                    optimizer.step()
                optimizer.zero_grad()

    alone(program)
    assert seen == [False, False, True, True]


def test_a_state_that_is_saved_in_inference_mode_can_be_trained_on() -> None:
    def program(ctx: Any) -> Any:
        net = made_small(1)
        optimizer = torch.optim.AdamW(net.parameters(), 0.1)
        with attach(net, optimizer, context=ctx, kind="update"):
            for _ in range(3):
                net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.inference_mode():
                    optimizer.state_dict()
                    assert not optimizer.state[net[0].weight]["exp_avg"].is_inference()

    loopback.run(2, program)
