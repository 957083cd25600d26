"""``pgasdl bench c10d``: backend "pgasdl" and gloo take turns in the same processes.

It measures the collectives of torch.distributed that trainings use, on float32 tensors in plain
memory. For the sum the core is measured, too: a handle on the same tensor.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pgasdl.context import Context
from pgasdl.tools.bench.output import Output
from pgasdl.tools.bench.request import Request
from pgasdl.tools.bench.session import Session
from pgasdl.tools.bench.timing import together
from pgasdl.tools.bench.turns import Contender

_PATIENCE = timedelta(seconds=120)
_untyped: Any = dist  # PyTorch's stubs do not export all
Way = Callable[[], object]


def measure(context: Context, request: Request) -> None:
    """Measure every size. Rank 0 prints the rows."""
    torch.set_num_threads(1)
    output = Output(context.rank, as_json=request.as_json)
    # Not on a processor each: gloo's own threads need some.
    session = Session(context, output, rounds=request.rounds, seconds=request.seconds, pinned=False)
    session.header(f"bench c10d, torch {torch.__version__}")
    output.say(f"microseconds, medians of {request.rounds} rounds in turns; ratio: gloo / ours")
    output.say(f"{'':>16} {'bytes':>9} {'ours':>10} {'best':>10} {'gloo':>10} {'core':>10} ratio")
    with tempfile.TemporaryDirectory(prefix="pgasdl-bench-") as own:
        folder = context.world.allgather("c10d", own.encode(), 60.0)[0].decode()
        store = _untyped.FileStore(os.path.join(folder, "store"), context.size)
        dist.init_process_group(
            "pgasdl",
            store=store,
            rank=context.rank,
            world_size=context.size,
            timeout=_PATIENCE,
        )
        groups = {"ours": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
        rows = [row for nbytes in request.sizes for row in _rows(session, request, groups, nbytes)]
        context.barrier(timeout=60.0)
        dist.destroy_process_group()
    output.write(rows)


def _rows(
    session: Session, request: Request, groups: dict[str, Any], nbytes: int
) -> list[dict[str, Any]]:
    """Measure one size, and print it."""
    context, rows = session.context, []
    sync = partial(context.barrier, timeout=60.0)
    whole = torch.ones(-(-nbytes // (4 * context.size)) * context.size)
    for name, call in _calls(whole, context.size).items():
        if name == "barrier" and nbytes != request.sizes[0]:
            continue
        ways: dict[str, Way] = {way: partial(call, group) for way, group in groups.items()}
        with contextlib.ExitStack() as stack:
            if name == "all_reduce":
                ways["core"] = stack.enter_context(context.allreduce_handle(whole))
            contenders = [Contender(way, together(ours, sync)) for way, ours in ways.items()]
            session.take_turns(contenders)
        whole.fill_(1.0)
        us = {one.name: one.samples().median for one in contenders}
        least = contenders[0].samples().least
        row = {"op": name, "bytes": nbytes, "us": us["ours"], "least_us": least}
        rows.append(row | {f"{way}_us": us[way] for way in us if way != "ours"})
        core = f"{us['core']:.1f}" if "core" in us else "-"
        session.say(
            f"{name:>16} {nbytes:9} {us['ours']:10.1f} {least:10.1f} "
            f"{us['gloo']:10.1f} {core:>10} {us['gloo'] / us['ours']:5.2f}"
        )
    return rows


def _calls(whole: torch.Tensor, size: int) -> dict[str, Callable[[Any], object]]:
    part, other = whole[: len(whole) // size].clone(), whole.clone()
    maximum = dist.ReduceOp.MAX
    return {
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
        "all_reduce, max": lambda group: dist.all_reduce(whole, maximum, group=group),
        "broadcast": lambda group: dist.broadcast(whole, 0, group=group),
        "all_gather": lambda group: dist.all_gather_single(whole, part, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_single(part, other, group=group),
        "all_to_all": lambda group: dist.all_to_all_single(whole, other, group=group),
        "barrier": lambda group: dist.barrier(group=group),
    }
