"""The options of ``pgasdl bench plans`` and ``pgasdl tune``, and what is drawn from the rows."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from pgasdl.errors import ConfigError
from pgasdl.plans import plugins
from pgasdl.tools.bench.request import Request
from pgasdl.tools.chart import Chart, Series, draw
from pgasdl.tools.sizes import parse_sizes
from pgasdl.transports import SETTINGS

PLAN_SIZES = "64,256,1K,4K,16K,64K,256K,1M,4M"
TUNE_SIZES = "64,512,4K,32K,256K,2M,8M"
_GOAL = 1.10
Row = dict[str, Any]


def add_plans(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench plans``."""
    _common(parser, PLAN_SIZES)
    parser.add_argument("-n", dest="jobs", default="2,4,8", metavar="LIST",
                        help="ranks, one job each (2,4,8)")  # fmt: skip
    parser.add_argument("--out", default="pgasdl-plans", metavar="DIR",
                        help="folder for rows and pictures (pgasdl-plans)")  # fmt: skip
    parser.set_defaults(handler=run_plans)


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of ``tune``."""
    parser.description = (
        "Measures latency, bandwidth and additions on this machine, then the plans that come near "
        "the best of what these predict, and writes a policy: PGASDL_POLICY=@FILE. On several "
        "machines: mpiexec or torchrun ... -m pgasdl.tools.bench.worker with the line it prints."
    )
    _common(parser, TUNE_SIZES)
    parser.add_argument("-n", dest="n_ranks", type=int, default=2, metavar="N", help="ranks (2)")
    parser.add_argument("--out", default="pgasdl.policy", metavar="FILE",
                        help="the policy file (pgasdl.policy)")  # fmt: skip
    parser.add_argument("--print-request", action="store_true",
                        help="only print the argument of pgasdl.tools.bench.worker")  # fmt: skip
    parser.set_defaults(handler=run_tune)


def _common(parser: argparse.ArgumentParser, sizes: str) -> None:
    parser.add_argument("--transport", default="auto", choices=SETTINGS, help="(auto)")
    parser.add_argument("--sizes", default=sizes, metavar="LIST", help=f"bytes ({sizes})")
    parser.add_argument("--repeat", type=int, default=7, metavar="R", help="rounds (7)")
    parser.add_argument("--seconds", type=float, default=0.02, metavar="S",
                        help="of one turn in a round, about (0.02)")  # fmt: skip
    parser.add_argument("--plan-modules", metavar="LIST",
                        help="modules or .py files that register more plans, by commas "
                        "(PGASDL_PLAN_MODULES)")  # fmt: skip


def _request(given: argparse.Namespace, op: str, ranks: int, file: str | None) -> Request:
    if not 1 <= ranks <= 16:
        raise ConfigError(f"-n {ranks}: 1 to 16 ranks of one machine")
    if not 1 <= given.repeat <= 10_000:
        raise ConfigError(f"--repeat {given.repeat}: 1 to 10000 rounds")
    if not (math.isfinite(given.seconds) and 0 < given.seconds <= 3600):
        raise ConfigError(f"--seconds {given.seconds}: more than 0, at most 3600")
    plugins.require_found(given.plan_modules or "")
    return Request(
        op=op, ranks=ranks, transport=given.transport,
        sizes=tuple(sorted(set(parse_sizes(given.sizes, 4)))), rounds=given.repeat,
        seconds=given.seconds, json_file=file, plan_modules=given.plan_modules,
    )  # fmt: skip


def run_tune(given: argparse.Namespace) -> int:
    """Tune one job; returns the exit status."""
    if not os.path.isdir(os.path.dirname(given.out) or "."):
        raise ConfigError(f"--out {given.out}: no such directory")
    request = _request(given, "tune", given.n_ranks, os.path.abspath(given.out))
    if given.print_request:
        print(request.dump())
        return 0
    return _start(request)


def run_plans(given: argparse.Namespace) -> int:
    """Measure every plan for each number of ranks; returns the exit status."""
    try:
        jobs = [int(part) for part in given.jobs.split(",")]
    except ValueError:
        raise ConfigError(f"-n {given.jobs}: numbers of ranks, such as 2,4,8") from None
    folder = Path(given.out)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in jobs:
            file = os.path.join(scratch, f"{ranks}.json")
            status = _start(_request(given, "plans", ranks, file))
            if status:
                return status
            rows += json.loads(Path(file).read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plans.json"
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print("\n".join(summary(rows)))
    print(f"wrote {path}")
    for ranks in jobs:
        for chart in charts([row for row in rows if row["ranks"] == ranks], ranks):
            print(draw(chart, folder))
    return 0


def _start(request: Request) -> int:
    from pgasdl.runtime.launch.run import Job, run

    environ = dict(os.environ)
    # Of a job that this one is started from; and a policy is what is looked for.
    for name in ("PGASDL_RANK", "PGASDL_LOCAL_RANK", "PGASDL_SECRET_FD", "PGASDL_POLICY"):
        environ.pop(name, None)
    environ["PGASDL_TRANSPORT"] = request.transport
    environ.setdefault("PGASDL_LOG", "warning")
    sys.stdout.flush()
    if request.transport == "loopback":
        from pgasdl import loopback
        from pgasdl.tools.bench.plans import measure

        loopback.run(
            request.ranks,
            lambda context: measure(context, request),
            plan_modules=request.plan_modules,
        )
        return 0
    program = ["-P", "-m", "pgasdl.tools.bench.worker", request.dump()]
    return run(Job(program, request.ranks, environ, prefix=False))


def cases(rows: list[Row]) -> list[tuple[Row, Row]]:
    """For every number of ranks and size: the tuner's choice, and the best in hindsight."""
    found = []
    for key in sorted({(row["ranks"], row["bytes"]) for row in rows}):
        here = [row for row in rows if (row["ranks"], row["bytes"]) == key]
        best = min(here, key=lambda row: row["us"])
        found += [(row, best) for row in here if row["chosen"]]
    return found


def summary(rows: list[Row]) -> list[str]:
    """How good the choice and the predictions were."""
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
    """Measured and predicted times of all plans, by size."""
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
