"""The options of ``pgasdl bench plans`` and ``pgasdl tune``, and the charts of their rows."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pgasdl.errors import ConfigError
from pgasdl.plans import plugins
from pgasdl.tools.bench.options import check_rounds, seconds_option, transport_option
from pgasdl.tools.bench.request import Request
from pgasdl.tools.bench.starting import start
from pgasdl.tools.chart import Chart, Series, draw
from pgasdl.tools.command import Function, ToolCommand, json_option
from pgasdl.tools.text import parse_sizes, write_json

PLAN_SIZES = "64,256,1K,4K,16K,64K,256K,1M,4M"
TUNE_SIZES = "64,512,4K,32K,256K,2M,8M"
PLANS_HELP = "every plan beside its predicted time, and the tuner's choice"
_TUNE_HELP = """\
Measures latency, bandwidth and additions on this machine, then the plans with the best predictions,
and writes a policy: PGASDL_POLICY=@FILE. On several machines: mpiexec or torchrun ...
-m pgasdl.tools.bench.worker with the line that --print-request prints.
"""
_GOAL = 1.10
Row = dict[str, Any]


def _common(sizes: str) -> Callable[[Function], Function]:
    """Add the options of both commands."""

    def add(function: Function) -> Function:
        for option in reversed(
            (
                transport_option("auto"),
                click.option(
                    "--sizes", default=sizes, show_default=True, metavar="LIST", help="Bytes."
                ),
                click.option(
                    "--repeat", type=int, default=7, show_default=True, metavar="R", help="Rounds."
                ),
                seconds_option,
                click.option(
                    "--plan-modules",
                    metavar="LIST",
                    help="Modules or .py files that register more plans, by commas "
                    "(PGASDL_PLAN_MODULES).",
                ),
                json_option,
            )
        ):
            function = option(function)
        return function

    return add


@click.command("plans", cls=ToolCommand, short_help=PLANS_HELP)
@_common(PLAN_SIZES)
@click.option(
    "-n", "jobs", default="2,4,8", show_default=True, metavar="LIST", help="Ranks, one job each."
)
@click.option(
    "--operation",
    type=click.Choice(["allreduce", "reduce", "broadcast"]),
    default="allreduce",
    show_default=True,
    help="What the plans do.",
)
@click.option(
    "--out",
    default="pgasdl-plans",
    type=click.Path(),
    show_default=True,
    metavar="DIR",
    help="Folder for rows and pictures.",
)
def plans_command(jobs: str, operation: str, out: str, as_json: bool, **given: Any) -> int:
    """Measure every plan beside its predicted time, and the tuner's choice."""
    try:
        counts = [int(part) for part in jobs.split(",")]
    except ValueError:
        raise ConfigError(f"-n {jobs}: numbers of ranks, such as 2,4,8") from None
    folder = Path(out)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in counts:
            file = os.path.join(scratch, f"{ranks}.json")
            request = _request("plans", ranks, **given)
            request = replace(request, operation=operation, as_json=as_json, rows_file=file)
            status = start(request)
            if status:
                return status
            rows += json.loads(Path(file).read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plans.json"
    write_json(rows, path)
    told = [*summary(rows), f"wrote {path}"]
    for ranks in counts:
        mine = [row for row in rows if row["ranks"] == ranks]
        told += [draw(chart, folder) for chart in charts(mine, ranks)]
    if as_json:
        write_json(rows)
    else:
        print("\n".join(told))
    return 0


@click.command("tune", cls=ToolCommand, help=_TUNE_HELP)
@_common(TUNE_SIZES)
@click.option("-n", "n_ranks", type=int, default=2, show_default=True, metavar="N", help="Ranks.")
@click.option(
    "--out",
    default="pgasdl.policy",
    type=click.Path(),
    show_default=True,
    metavar="FILE",
    help="The policy file.",
)
@click.option(
    "--print-request", is_flag=True, help="Only print the argument of pgasdl.tools.bench.worker."
)
def command(n_ranks: int, out: str, print_request: bool, as_json: bool, **given: Any) -> int:
    """Tune one job."""
    if not os.path.isdir(os.path.dirname(out) or "."):
        raise ConfigError(f"--out {out}: no such directory")
    request = replace(
        _request("tune", n_ranks, **given), as_json=as_json, policy_file=os.path.abspath(out)
    )
    if print_request:
        print(request.dump())
        return 0
    return start(request)


def _request(
    op: str,
    ranks: int,
    *,
    transport: str,
    sizes: str,
    repeat: int,
    seconds: float,
    plan_modules: str | None,
) -> Request:
    if not 1 <= ranks <= 16:
        raise ConfigError(f"-n {ranks}: 1 to 16 ranks of one machine")
    check_rounds(repeat, seconds)
    plugins.require_found(plan_modules or "")
    return Request(
        op=op,
        ranks=ranks,
        transport=transport,
        sizes=tuple(sorted(set(parse_sizes(sizes, 4)))),
        rounds=repeat,
        seconds=seconds,
        plan_modules=plan_modules,
    )


def cases(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Return the tuner's choice and the best in hindsight, by number of ranks and size."""
    found = []
    for key in sorted({(row["ranks"], row["bytes"]) for row in rows}):
        here = [row for row in rows if (row["ranks"], row["bytes"]) == key]
        best = min(here, key=lambda row: row["us"])
        found += [(row, best) for row in here if row["chosen"]]
    return found


def summary(rows: list[Row]) -> list[str]:
    """Describe the quality of the choice and of the predictions."""
    lines = [
        "ranks      bytes  tuner's choice                 us  best in hindsight              us   x"
    ]
    good = 0
    pairs = cases(rows)
    for chosen, best in pairs:
        ratio = chosen["us"] / best["us"]
        good += ratio <= _GOAL
        lines.append(
            f"{chosen['ranks']:>5} {chosen['bytes']:>10}  "
            f"{chosen['plan']:<22} {chosen['us']:>10.2f}  "
            f"{best['plan']:<22} {best['us']:>10.2f}  x {ratio:.2f}"
        )
    if pairs:
        lines.append(
            f"the tuner's choice was within 10 % of the best in {good} of {len(pairs)} cases "
            f"({100 * good / len(pairs):.0f} %)"
        )
    ratios = [row["predicted_us"] / row["us"] for row in rows if row["us"] > 0]
    if ratios:
        within = sum(1 / 2 <= ratio <= 2 for ratio in ratios)
        lines.append(
            f"predicted over measured: median {statistics.median(ratios):.2f}; within a factor of "
            f"two in {100 * within / len(ratios):.0f} % of {len(ratios)} figures"
        )
    return lines


def charts(rows: list[Row], ranks: int) -> list[Chart]:
    """Make charts of the measured and predicted times of all plans, by size."""
    if not rows:
        return []
    plans = list(dict.fromkeys(row["plan"] for row in rows if "(" not in row["plan"]))

    def series(figure: str) -> list[Series]:
        found = []
        for plan in plans:
            mine = sorted((r["bytes"], r[figure]) for r in rows if r["plan"] == plan)
            found.append(Series(plan, [x for x, _ in mine], [y for _, y in mine]))
        return found

    where = f"{ranks} ranks, {rows[0]['transport']}"
    chosen = sorted((r["bytes"], r["us"]) for r in rows if r["chosen"])
    mark = Series("the tuner's choice", [x for x, _ in chosen], [y for _, y in chosen], paper=True)
    measured, predicted = [*series("us"), mark], series("predicted_us")
    return [
        Chart(f"plans-{ranks}-measured", f"Measured: {where}", "bytes", "us", measured),
        Chart(f"plans-{ranks}-predicted", f"Predicted: {where}", "bytes", "us", predicted),
    ]
