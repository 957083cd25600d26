"""From plans to the engine's arrays: step by step, or as an outline where all ranks do the same.

A plan in which 1024 ranks all send to all has four million steps, which take longer to write down
than to simulate. Such a plan has an outline: the steps of one rank, with peers relative to it and
bytes by rank. Tests compare each outline with the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pgasdl import _native
from pgasdl.errors import PlanError
from pgasdl.plans import Call, Copy, Flush, Plan, Put, Reduce, Step, Wait, blocks, build, spec_of
from pgasdl.plans.cost import additions, bytes_of, remote_spans
from pgasdl.plans.plan import APPLICATION_BUFFERS, Sizes

Ops = npt.NDArray[np.int64]

_PUT, _WAIT, _REDUCE, _CALL, _FLUSH = range(5)
_RELATIVE, _BYTES_OF_PEER, _BYTES_OF_SELF = 8, 16, 32
_NOTE_OF_PEER, _NOTE_OF_SELF, _SKIP_IF_NONE = 64, 128, 256

# Up to this size plans are validated; above, that would take longer than everything else.
_VALIDATED = 64
# From this size on outlines are used.
_OUTLINED = 128


@dataclass(frozen=True, slots=True)
class Exchange:
    """One execution of one plan by all ranks.

    Attributes
    ----------
    plan : str
        Name of a row of ``PLANS``.
    count : int
        Elements.
    item : int
        Bytes of an element.
    kind : str
        The result that the plan computes; one of ``PLANS[plan].kinds``.
    options : tuple[tuple[str, Sizes], ...]
        Options of the plan, as pairs.
    """

    plan: str
    count: int
    item: int = 4
    kind: str = "average"
    options: tuple[tuple[str, Sizes], ...] = field(default=())


def program(exchange: Exchange, size: int) -> _native.Program:
    """Return the engine's program of an exchange; PlanError: no such plan or options."""
    outline = OUTLINES.get(exchange.plan)
    plain = exchange.kind != "update" and not exchange.options
    if outline is not None and size >= _OUTLINED and plain and exchange.count:
        return outline(exchange, size)
    return encoded(_plans(exchange, size), size, exchange.item)


def workspace_bytes(exchange: Exchange, size: int) -> int:
    """Return the bytes of a plan's own buffers on a rank; PlanError: no such plan or options."""
    plan = spec_of(exchange.plan).build(
        0, size, exchange.count, kind=exchange.kind, wire=False, **dict(exchange.options)
    )
    own = (n for name, n in plan.buffers.items() if name not in APPLICATION_BUFFERS)
    return exchange.item * sum(own)


def _plans(exchange: Exchange, size: int) -> Iterable[Plan]:
    """Yield the plans of all ranks, one at a time: together they may not fit into memory."""
    spec = spec_of(exchange.plan)
    options: dict[str, Any] = dict(exchange.options)
    if size <= _VALIDATED:
        for rank in range(size):
            yield build(
                exchange.plan, rank, size, exchange.count, kind=exchange.kind, wire=False, **options
            )
    else:
        for rank in range(size):
            yield spec.build(rank, size, exchange.count, kind=exchange.kind, wire=False, **options)


def encoded(plans: Iterable[Plan], size: int, item: int = 4) -> _native.Program:
    """Encode plans step by step."""
    rows: list[tuple[int, int, int, int]] = []
    lanes: list[list[tuple[int, int]]] = []
    notifications = 0
    for plan in plans:
        mine = []
        notifications = plan.notifications
        for steps in plan.lanes:
            begin = len(rows)
            rows.extend([_row(step, item) for step in steps])
            mine.append((begin, len(rows)))
        lanes.append(mine)
    width = max((len(mine) for mine in lanes), default=0)
    ranges = np.zeros((size, width, 2), np.int64)
    for rank, mine in enumerate(lanes):
        for lane, bounds in enumerate(mine):
            ranges[rank, lane] = bounds
    ops = np.array(rows, np.int64).reshape(-1, 4)
    return _native.Program(ops, ranges, np.zeros(0, np.int64), size, notifications)


def _row(step: Step, item: int) -> tuple[int, int, int, int]:
    match step:
        case Put(src, n, peer, _, notify):
            return _PUT, peer, -1 if notify is None else notify, n * bytes_of(src, item, item)
        case Wait(notification):
            return _WAIT, 0, notification, 0
        case Reduce(_, _, n):
            return _REDUCE, additions(step), remote_spans(step), n * item
        case Copy(dst, src):
            remote = (dst.rank is not None) + (src.rank is not None)
            return _REDUCE, 0, remote, step.total * item
        case Call(_, _, n):
            return _CALL, 0, 0, n * item
        case Flush():
            return _FLUSH, 0, 0, 0
    raise PlanError(f"no step {step!r}")


def _gdraa(exchange: Exchange, size: int) -> _native.Program:
    """Outline kinds average and sum of ``plans/algorithms/gdraa.py``."""
    peers = np.arange(1, size, dtype=np.int64)

    def sweep(flags: int, order: Ops, note: int) -> Ops:
        rows = np.zeros((size - 1, 4), np.int64)
        rows[:, 0], rows[:, 1], rows[:, 2] = flags | _RELATIVE | _SKIP_IF_NONE, order, note
        return rows

    mine = _BYTES_OF_SELF | _SKIP_IF_NONE
    reduce = np.array([[_REDUCE | mine, size - 1, 0, 0]], np.int64)
    flush = np.array([[_FLUSH | mine, 0, 0, 0]], np.int64)
    ops = np.concatenate(
        [
            sweep(_PUT | _BYTES_OF_PEER | _NOTE_OF_SELF, peers, 0),
            sweep(_WAIT | _BYTES_OF_SELF | _NOTE_OF_PEER, peers[::-1], 0),
            reduce,
            sweep(_PUT | _BYTES_OF_SELF | _NOTE_OF_SELF, peers, size),
            sweep(_WAIT | _BYTES_OF_PEER | _NOTE_OF_PEER, peers[::-1], size),
            flush,
        ]
    )
    table = np.array([n * exchange.item for _, n in blocks(exchange.count, size)], np.int64)
    ranges = np.tile(np.array([0, len(ops)], np.int64), (size, 1, 1))
    return _native.Program(ops, ranges, table, size, 2 * size)


OUTLINES: dict[str, Callable[[Exchange, int], _native.Program]] = {"gdraa": _gdraa}
