"""Steps: allreduces, handles and exchanges; completing held calls, and dropping objects."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from oracle import DTYPES, RATE, Array, reduced, require, result, value
from rank import Pending, Rank, step

import pgasdl


@step
def array(r: Rank, name: str, group: str, dtype: str, count: int, segment: str, at: int) -> None:
    r.made(name, group, memory(r, dtype, count, segment, at))


def memory(r: Rank, dtype: str, count: int, segment: str = "", at: int = 0) -> Array:
    """An array in a segment; without one, in the pool, unless it is large."""
    if not segment:
        pooled = count * np.dtype(DTYPES[dtype]).itemsize <= 1 << 16  # equal on all ranks
        return r.ctx.zeros(count, DTYPES[dtype]) if pooled else np.zeros(count, DTYPES[dtype])
    found: Array = r.objects[segment].numpy(DTYPES[dtype], at, count)
    return found


@step
def allreduce(
    r: Rank,
    group: str,
    array: str,
    op: str,
    key: int,
    plan: str | None,
    other: Sequence[bool],
    **how: Any,
) -> None:
    of, mine = r.objects[group], r.objects[array]
    terms = [value(rank, key, mine.size, str(mine.dtype)) for rank in r.ranks_of[group]]
    wanted = reduced(terms, op == "mean")
    mine[...] = terms[r.member(group)]

    def another() -> None:
        """Another allreduce is refused until the one that timed out has ended."""
        try:
            r.ctx.allreduce(np.ones(11, np.float32), op="sum", group=of)
        except pgasdl.MismatchError:
            return
        raise AssertionError("another allreduce before the one that timed out was accepted")

    r.carry_out(
        Pending(
            lambda timeout: r.ctx.allreduce(mine, op=op, group=of, plan=plan, timeout=timeout),
            lambda: require(mine, wanted, f"allreduce {op}, plan {plan}"),
        ),
        after_timeout=another if other[r.rank] else None, **how,
    )  # fmt: skip


@step
def often(
    r: Rank, group: str, array: str, once: list[str], turns: int, key: int, plan: str | None
) -> None:
    """Repeat one call on changing values; before and after it, make one on another array."""
    of, ranks = r.objects[group], r.ranks_of[group]
    own, values = r.member(group), {}
    for name in (array, *once):
        mine = r.objects[name]
        for n in range(4):  # 4 does not divide the number of executions after which numbers repeat
            terms = [value(rank, key + n, mine.size, str(mine.dtype)) for rank in ranks]
            values[name, n] = terms[own], reduced(terms, False)
    for turn, name in enumerate([*once, *[array] * turns, *once]):
        mine = r.objects[name]
        mine[...], wanted = values[name, turn % 4]
        r.ctx.allreduce(mine, op="sum", group=of, plan=None if name == array else plan)
        require(mine, wanted, f"allreduce {turn} of {turns}")


@step
def handle(
    r: Rank,
    name: str,
    group: str,
    kind: str,
    dtype: str,
    count: int,
    plan: str | None,
    segment: str,
    at: int,
    out: bool,
    root: int | None,
    **how: Any,
) -> None:
    given = memory(r, dtype, count, segment, at)
    target = memory(r, dtype, count) if out else given
    options: dict[str, Any] = {} if root is None else {"root": root}
    if out:
        options["out"] = target
    made = r.create(
        lambda timeout: r.ctx.collective_handle(
            kind, given, group=r.objects[group], plan=plan, timeout=timeout, **options
        ),
        **how,
    )
    r.made(name, group, made, kind=kind, dtype=dtype, given=given, target=target, root=root or 0)


def execution(r: Rank, handle: str, key: int, start: bool) -> Pending:
    """One execution of a handle, on new values."""
    run, notes, ranks = r.objects[handle], r.notes[handle], r.ranks_of[r.group_of[handle]]
    given, target = notes["given"], notes["target"]
    terms = [value(rank, key, given.size, notes["dtype"]) for rank in ranks]
    mine = r.member(r.group_of[handle])
    wanted = result(notes["kind"], terms, mine, notes["root"])
    given[...] = terms[mine]

    def check() -> None:
        require(target, wanted, f"{run!r}")
        if target is not given:
            require(given, terms[mine], f"source of {run!r}")

    if start:
        run.start()
    return Pending(lambda t: run.wait(timeout=t) if start else run(timeout=t), check)


@step
def run(r: Rank, handle: str, key: int, start: Sequence[bool], **how: Any) -> None:
    if handle in r.objects:
        r.carry_out(execution(r, handle, key, start[r.rank]), **how)


@step
def exchange(
    r: Rank,
    name: str,
    group: str,
    kind: str,
    layers: Sequence[tuple[int, str]],
    plan: str | None,
    bucket_bytes: int,
    **how: Any,
) -> None:
    shapes = [((count,), DTYPES[dtype]) for count, dtype in layers]
    made = r.create(
        lambda timeout: pgasdl.GradientExchange(
            r.ctx, shapes, kind=kind, plan=plan, bucket_bytes=bucket_bytes,
            update=update if kind == "update" else None, group=r.objects[group], timeout=timeout,
        ),
        **how,
    )  # fmt: skip
    weights = [value(0, number, *layer) for number, layer in enumerate(layers)]
    if kind == "update":
        for number, each in enumerate(weights):
            made.weight(number)[...] = each
    r.made(name, group, made, kind=kind, layers=layers, weights=weights)


def update(block: pgasdl.Block) -> None:
    """Every operation is rounded separately, however the blocks are cut."""
    block.weights -= block.gradient * block.gradient.dtype.type(RATE)


def begin_iteration(
    r: Rank,
    exchange: str,
    key: int,
    ready: Sequence[int],
    wait: Sequence[int],
    finish: bool,
    turns: int,
) -> Pending:
    """Make all layers ready; what remains is to wait for them."""
    of, notes, ranks = r.objects[exchange], r.notes[exchange], r.ranks_of[r.group_of[exchange]]
    wanted = []
    for number, (count, dtype) in enumerate(notes["layers"]):
        terms = [value(rank, key + number, count, dtype) for rank in ranks]
        total = reduced(terms, notes["kind"] != "sum")
        if notes["kind"] == "update":
            notes["weights"][number] = notes["weights"][number] - total * total.dtype.type(RATE)
            total = notes["weights"][number]
        wanted.append(total)
    for number in ready:
        count, dtype = notes["layers"][number]
        of.gradient(number)[...] = value(r.rank, key + number, count, dtype)
        of.ready(number)
    for _ in range(turns):
        of.turn()

    def ended(timeout: Any) -> None:
        if finish:
            of.finish(timeout=timeout)
        for number in wait:
            of.wait(number, timeout=timeout)

    def check() -> None:
        for number, values in enumerate(wanted):
            found = of.weight(number) if notes["kind"] == "update" else of.gradient(number)
            require(found, values, f"layer {number}, {of.describe()}")

    return Pending(ended, check)


@step
def iterate(
    r: Rank, exchange: str, key: int, ready: Any, wait: Any, finish: Any, turns: Any, **how: Any
) -> None:
    if exchange in r.objects:
        mine = (each[r.rank] for each in (ready, wait, finish, turns))
        r.carry_out(begin_iteration(r, exchange, key, *mine), **how)


@step
def complete(r: Rank, polls: Any, orders: Any, then: Sequence[str]) -> None:
    """Complete what is under way, in this rank's order."""
    for name in polls[r.rank]:
        if name in r.held:
            try:
                r.held[name].attempt(0)
            except pgasdl.PgasTimeoutError:
                time.sleep(0)
    for name in (*orders[r.rank], *then):
        if name in r.held:
            r.held.pop(name).attempt(None)


# --- the end of objects


def give_back(thing: Any, how: str) -> None:
    """Close an object, leave it by ``with``, or leave it to the garbage collector."""
    if how == "with" and hasattr(thing, "__enter__"):
        with thing:
            pass
    elif how != "del" and hasattr(thing, "close"):
        thing.close()
    elif how != "del" and hasattr(thing, "delete"):
        thing.delete()


@step
def drop(r: Rank, names: Sequence[str], how: Sequence[str]) -> None:
    for name in names:
        if name in r.objects:
            thing = r.objects.pop(name)
            del r.notes[name]
            way = how[r.rank]
            if isinstance(thing, np.ndarray):
                way = "del"
            elif way == "del" and not r.ctx.mapped:
                way = "close"  # its memory would stay
            give_back(thing, way)
            if way != "del" and hasattr(thing, "start") and hasattr(thing, "close"):
                closed(lambda thing=thing: thing())  # type: ignore[misc]
            if way != "del" and hasattr(thing, "ready"):
                closed(lambda thing=thing: thing.ready(0))  # type: ignore[misc]


def closed(call: Any) -> None:
    """Require that the call raises ClosedError."""
    try:
        call()
    except pgasdl.ClosedError:
        return
    raise AssertionError("a closed object was used")


@step
def give_up(
    r: Rank,
    handle: str,
    key: int,
    absent: int | None,
    attempts: Sequence[Sequence[float | str]],
    lag: Sequence[float],
    how: Sequence[str],
) -> None:
    """A rank never joins, or all stop waiting: the handle is dropped in mid-execution."""
    if handle not in r.objects:
        return
    time.sleep(lag[r.rank])
    if absent != r.rank:
        pending = execution(r, handle, key, False)
        for timeout in [each for each in attempts[r.rank] if not isinstance(each, str)] or [0]:
            with contextlib.suppress(pgasdl.PgasTimeoutError):
                pending.attempt(timeout)
    drop(r, [handle], how)


class HookError(Exception):
    """Raised by an update."""


@step
def hook_raises(
    r: Rank, group: str, key: int, plan: str, count: int, good: int, how: Sequence[str], **make: Any
) -> None:
    """The owners' update raises: this closes the exchange on all ranks, and nothing else.

    A rank that still waits for a gradient, which was lost on its way, may hear first of a peer that
    raised: then its own update is not called.
    """
    raising = []

    def hook(block: pgasdl.Block) -> None:
        if raising:
            raise HookError
        update(block)

    made = r.create(
        lambda timeout: pgasdl.GradientExchange(
            r.ctx, [((count,), np.float32)], kind="update", plan=plan, update=hook,
            group=r.objects[group], timeout=timeout,
        ),
        **make,
    )  # fmt: skip
    name = f"exchange of {key}"
    r.made(name, group, made, kind="update", layers=[(count, "float32")],
           weights=[value(0, 0, count, "float32")])  # fmt: skip
    made.weight(0)[...] = value(0, 0, count, "float32")
    for turn in range(good):
        begin_iteration(r, name, key + turn, [0], [0], False, 0).attempt(None)
    raising.append(True)
    made.gradient(0)[...] = 1
    try:
        made.ready(0)
        made.wait(0)
    except HookError:
        closed(lambda: made.ready(0))
    except pgasdl.PeerLostError as error:
        assert "has given it up" in str(error) and "HookError()" in str(error), error
        made.close(finish=False)
    else:
        raise AssertionError("the update's exception was lost")
    drop(r, [name], how)
