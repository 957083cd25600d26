"""Steps: calls with wrong arguments. Each raises an error on its rank only and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rank import Rank, refused, step

import pgasdl

_LAYERS = [((4,), np.float32)]


def _read_only() -> np.ndarray:
    array = np.ones(4, np.float32)
    array.flags.writeable = False
    return array


def _ones(dtype: Any = np.float32) -> np.ndarray:
    return np.ones(4, dtype)


def _exchange(ctx: Any, layers: Any = _LAYERS, **given: Any) -> Any:
    return pgasdl.GradientExchange(ctx, layers, **given)


# ``account.WRONG`` lists the same names.
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "allreduce dtype": lambda ctx, _: ctx.allreduce(_ones(np.complex64), op="sum"),
    "allreduce strides": lambda ctx, _: ctx.allreduce(np.ones(8, np.float32)[::2], op="sum"),
    "allreduce readonly": lambda ctx, _: ctx.allreduce(_read_only(), op="sum"),
    "allreduce op": lambda ctx, _: ctx.allreduce(_ones(), op="x"),
    "allreduce plan": lambda ctx, _: ctx.allreduce(_ones(), op="sum", plan="none"),
    "handle plan": lambda ctx, _: ctx.allreduce_handle(_ones(), op="sum", plan="none"),
    "handle op": lambda ctx, _: ctx.allreduce_handle(_ones(), op="x"),
    "handle dtype": lambda ctx, _: ctx.allreduce_handle(_ones(np.complex64), op="sum"),
    "handle kind": lambda ctx, _: ctx.collective_handle("update", _ones()),
    "handle out": lambda ctx, _: ctx.allreduce_handle(_ones(), op="sum", out=_ones(np.int32)),
    "group twice": lambda ctx, _: ctx.group([ctx.rank, ctx.rank]),
    "group rank": lambda ctx, _: ctx.group([ctx.rank, 99]),
    "segment size": lambda ctx, _: ctx.segment(-5),
    "segment notifications": lambda ctx, _: ctx.segment(8, notifications=-1),
    "bind readonly": lambda ctx, _: ctx.bind(b"abc"),
    "pool size": lambda ctx, _: ctx.pool(-5),
    "pool full": lambda ctx, _: ctx.empty(1 << 30),
    "pool objects": lambda ctx, _: ctx.empty(1, object),
    "exchange plan": lambda ctx, _: _exchange(ctx, plan="none"),
    "exchange kind": lambda ctx, _: _exchange(ctx, kind="none"),
    "exchange dtype": lambda ctx, _: _exchange(ctx, [((4,), np.complex64)]),
    "exchange update": lambda ctx, _: _exchange(ctx, kind="update"),
    "exchange wire": lambda ctx, _: _exchange(ctx, wire="complex64"),
    "passive rank": lambda ctx, _: ctx.passive_send(b"x", 99),
    "passive length": lambda ctx, _: ctx.passive_send(bytes(1 << 20), ctx.rank),
    "reduce op": lambda ctx, _: ctx.world.combine(_ones(), "x"),
    "reduce objects": lambda ctx, _: ctx.world.combine(np.array([None]), "sum"),
    "ping rank": lambda ctx, _: ctx.ping(99),
    "write bounds": lambda ctx, s: ctx.write(s[0:8], ctx.rank, s[1 << 20 : (1 << 20) + 8]),
    "write rank": lambda ctx, s: ctx.write(s[0:8], 99, s[8:16]),
    "notify value": lambda ctx, s: ctx.notify(ctx.rank, s, 0, 0),
    "notify id": lambda ctx, s: ctx.notify(ctx.rank, s, 1 << 20),
    "view bounds": lambda _, s: s.numpy(np.float32, 1 << 20, 8),
    "no layer": lambda _, x: x.ready(99),
}


@step
def wrong(r: Rank, call: str, on: str, who: Sequence[bool]) -> None:
    if who[r.rank] and (not on or on in r.objects):
        refused(lambda: CALLS[call](r.ctx, r.objects.get(on)), call)
