"""An optimizer's state in the midst of training: looks at it, resets, copies, checkpoints."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch_tools import made_small, same  # noqa: E402

from pgasdl import loopback  # noqa: E402
from pgasdl.torch import attach  # noqa: E402

kinds = pytest.mark.parametrize("kind", ["average", "update"])
Each = Callable[[Any, Any, int], None]


def train(ctx: Any, kind: str, each: Each) -> Any:
    """Train with ``each(net, optimizer, step)`` after every step; without ``kind``, alone."""
    net = made_small(1)
    optimizer = torch.optim.AdamW(net.parameters(), 0.05, amsgrad=True)
    with attach(net, optimizer, context=ctx, kind=kind) if kind else contextlib.nullcontext():
        for step in range(5):
            x = torch.linspace(-1, step, 12, dtype=torch.float64).view(3, 4)
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            each(net, optimizer, step)
    return net


def as_alone(kind: str, each: Each) -> None:
    expected = train(None, "", each)
    for net in loopback.run(2, lambda ctx: train(ctx, kind, each)):
        same(net, expected)


def _clear(optimizer: Any) -> None:
    optimizer.state.clear()


def _assign(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def _load(optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict() | {"state": {}})


def _zero(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def _zero_around_a_save(optimizer: Any) -> None:
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    optimizer.state_dict()
    for each in moments:
        each.zero_()


def _pop(optimizer: Any) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"][1])


def _set(optimizer: Any) -> None:
    first, *_, last = optimizer.param_groups[0]["params"]
    optimizer.state[first]["step"] = torch.tensor(7.0)
    optimizer.state[last] = {key: v * 0.5 for key, v in optimizer.state[last].items()}


@kinds
@pytest.mark.parametrize("reset", [_clear, _assign, _load, _zero, _zero_around_a_save, _pop, _set])
def test_a_reset_comes_after_the_step(reset: Callable[[Any], None], kind: str) -> None:
    def each(net: Any, optimizer: Any, step: int) -> None:
        if step in (1, 2):
            reset(optimizer)

    as_alone(kind, each)


def _saved(optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "save": _saved,
}


@kinds
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_has_the_state(way: str, kind: str) -> None:
    """And goes its own way: the training stays what it is."""
    states: defaultdict[int, list[Any]] = defaultdict(list)

    def each(net: Any, optimizer: Any, step: int) -> None:
        if step in (0, 3):
            copied = COPIES[way](optimizer)
            assert way == "copy" or type(copied.state) is defaultdict
            values = [dict(state) for state in copied.state.values()]
            assert [state["step"].item() for state in values] == [step + 1] * 4
            states[step].append(copy.deepcopy(values))

    as_alone(kind, each)
    for plain, *others in states.values():
        for other in others:
            torch.testing.assert_close(other, plain)


@kinds
def test_a_look_tells_what_one_process_has(kind: str) -> None:
    def each(net: Any, optimizer: Any, step: int) -> None:
        state = optimizer.state
        parameters = optimizer.param_groups[0]["params"]
        assert state and len(state) == 4 and set(state) == set(parameters)
        assert parameters[0] in state and dict(state).keys() == {**state}.keys() == state.keys()
        assert state.copy().keys() == state.keys() == (state | {}).keys()
        assert state.get("a new key", 1) == state.pop("a new key", 1) == 1
        assert state.setdefault("a new key", 1) == 1 and state.pop("a new key") == 1
        assert state[parameters[2]]["step"] == step + 1 and state["a new key"] == {}
        del state["a new key"]
        assert state.default_factory is dict and isinstance(state, Mapping)

    as_alone(kind, each)


@kinds
def test_a_distributed_checkpoint_changes_nothing(kind: str) -> None:
    """Of torch.distributed.checkpoint, which steps an optimizer that has no state yet."""
    from torch.distributed.checkpoint import state_dict as checkpoints  # takes a second

    saved = {}

    def each(net: Any, optimizer: Any, step: int) -> None:
        if step == 2:
            model, state = copy.deepcopy(checkpoints.get_state_dict(net, optimizer))
            assert [of["step"].item() for of in state["state"].values()] == [3] * 4
            saved[net] = {"model_state_dict": model, "optim_state_dict": state}
        elif step == 3:  # and back, and the step again
            checkpoints.set_state_dict(net, optimizer, **saved[net])

    def plain(net: Any, optimizer: Any, step: int) -> None:
        if step == 2:
            saved[net] = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
        elif step == 3:
            net.load_state_dict(saved[net][0])
            optimizer.load_state_dict(saved[net][1])

    expected = train(None, "", plain)
    for net in loopback.run(2, lambda ctx: train(ctx, kind, each)):
        same(net, expected)
