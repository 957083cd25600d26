"""Ranks as threads with a process group each, and the results that collectives must have."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from support.ranks import on_ranks

torch = pytest.importorskip("torch")

from torch.distributed import distributed_c10d as c10d  # noqa: E402

from pgasdl import loopback  # noqa: E402
from pgasdl.torch.backend.group import ProcessGroup  # noqa: E402
from pgasdl.torch.backend.meet import SharedContext  # noqa: E402

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
)
OPERATORS: dict[str, Callable[..., Any]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
BITS = ("BAND", "BOR", "BXOR")


def run(size: int, program: Callable[[Any], Any], **options: Any) -> list[Any]:
    """Call ``program(group)`` on every rank."""

    def rank(ctx: Any) -> Any:
        shared = SharedContext(ctx, range(size), ours=False)
        group = ProcessGroup(shared, range(size), ctx.rank, timedelta(seconds=30))
        try:
            return program(group)
        finally:
            ctx.barrier()
            group.shutdown()

    return loopback.run(size, rank, **options)


ranks = partial(on_ranks, run=run)


def options(kind: Any, **values: Any) -> Any:
    made = kind()
    made.asyncOp = False
    for name, value in values.items():
        setattr(made, name, value)
    return made


def reduced(op: Any) -> Any:
    return options(c10d.AllreduceOptions, reduceOp=op)


def drawn(seed: int, count: int, dtype: Any) -> Any:
    """Small whole numbers: every dtype adds and multiplies them exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 4, (count,), generator=generator).to(dtype)


def expected(op: str, parts: list[Any]) -> Any:
    total = parts[0].clone()
    for part in parts[1:]:
        total = OPERATORS[op](total, part)
    return total
