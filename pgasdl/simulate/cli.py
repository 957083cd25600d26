"""``pgasdl sim``: plans on modelled machines, and the papers' experiments."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pgasdl import models
from pgasdl.collectives.policy import Choice, Policy
from pgasdl.config import Config
from pgasdl.errors import ConfigError, PlanError
from pgasdl.plans import PLANS, plugins
from pgasdl.simulate import library
from pgasdl.simulate.machine import MACHINES, Machine
from pgasdl.simulate.papers import STUDIES
from pgasdl.simulate.program import Exchange, workspace_bytes
from pgasdl.simulate.run import simulate
from pgasdl.tools.command import Names, PlanNames, ToolCommand, json_option
from pgasdl.tools.text import parse_size, unknown_name, write_json

_HELP = """\
Simulates exchanges event by event on a modelled machine: ports, over-subscribed links, additions,
ranks that are late. Nothing is measured; `pgasdl bench` measures.

\b
  pgasdl sim -n 1024 --machine supernodes --plans 'gdraa,halving-doubling(group_size=256)'
  pgasdl sim --paper s-caffe,swcaffe --out DIR      the papers' runs, their figures beside ours

\b
a rank        messages of the rank that sends most
neighbours    ranks that it sends to or gets from, the most: connections
workspace     a plan's own memory on each rank, of 1024 and of 16384 ranks; -: it is not for so many

\b
Below: what the library itself costs a rank of 1024 and of 16384, each on a machine of its own,
whatever the plan. An adapter pins all of the memory; shared memory has pages of what was used.
"""
_LARGEST = 1 << 16
# Numbers of ranks for which a plan's memory and the library's own costs are printed.
_LARGE = (1024, 16384)
_HEAD = (
    f"{'plan':<34} {'ms':>10} {'busiest port':>13} {'messages':>11} {'a rank':>7} "
    f"{'neighbours':>10} {'workspace MB':>14} {'simulated in':>13}"
    "   busiest link and bytes met, by level"
)


@click.command("sim", cls=ToolCommand, help=_HELP)
@click.option("-n", "n_ranks", type=int, default=64, show_default=True, metavar="N", help="Ranks.")
@click.option(
    "--machine",
    default="flat",
    type=Names(sorted(MACHINES), "machine"),
    show_default=True,
    metavar=f"[{'|'.join(sorted(MACHINES))}]",
    help="Modelled machine.",
)
@click.option(
    "--plans",
    default="gdraa,halving-doubling,ring,tree",
    show_default=True,
    metavar="LIST",
    type=PlanNames(),
    help="Plans, with options in parentheses.",
)
@click.option(
    "--plan-modules",
    metavar="LIST",
    help="Modules or .py files that register more plans, by commas (PGASDL_PLAN_MODULES).",
)
@click.option("--size", metavar="BYTES", help="One array of so many bytes (16M).")
@click.option(
    "--model",
    type=Names(models.NAMES, "model"),
    metavar="M",
    help=f"Or a network's layers, each alone: {', '.join(models.NAMES)}.",
)
@click.option(
    "--skew",
    type=float,
    default=0.0,
    show_default=True,
    metavar="US",
    help="Ranks begin up to so many microseconds late.",
)
@click.option(
    "--paper",
    type=Names(tuple(STUDIES), "paper", several=True),
    metavar="LIST",
    help=f"{', '.join(STUDIES)}, or all.",
)
@click.option(
    "--out",
    default="pgasdl-sim",
    type=click.Path(),
    show_default=True,
    metavar="DIR",
    help="Of --paper.",
)
@json_option
def command(
    n_ranks: int,
    machine: str,
    plans: str,
    plan_modules: str | None,
    size: str | None,
    model: str | None,
    skew: float,
    paper: tuple[str, ...] | None,
    out: str,
    as_json: bool,
) -> None:
    """Simulate."""
    if paper is not None:
        _papers(paper, Path(out), as_json)
        return
    if not 1 <= n_ranks <= _LARGEST:
        raise ConfigError(f"-n {n_ranks}: 1 to {_LARGEST} ranks")
    if size is not None and model is not None:
        raise ConfigError("--size and --model: one of them")
    if not 0 <= skew <= 1e9:
        raise ConfigError(f"--skew {skew}: microseconds, from 0 to 1e9")
    counts: tuple[int, ...] = (parse_size(size or "16M") // 4,)
    if model is not None:
        counts = models.layers(model)
    config = Config.from_environment(plan_modules=plan_modules)
    plugins.load(config.plan_modules or "")
    found = _simulate(MACHINES[machine](n_ranks), choices(plans), counts, skew, as_json)
    costs = library.costs(_LARGE, config)
    if as_json:
        write_json(found | {"library": costs})
    else:
        print(f"\n{library.table(costs)}")


def _papers(names: tuple[str, ...], folder: Path, as_json: bool) -> None:
    written = []
    for name in names:
        study = STUDIES[name]()
        said = study.write(folder)
        written.append(asdict(study))
        if not as_json:
            print(study)
            print("\n".join(said), end="\n\n", flush=True)
    if as_json:
        write_json(written)


def _simulate(
    machine: Machine,
    plans: list[Choice],
    counts: Sequence[int],
    skew: float,
    as_json: bool,
) -> dict[str, Any]:
    generator = random.Random(0)  # noqa: S311
    begin = [generator.uniform(0, skew * 1e-6) for _ in range(machine.size)]
    rows: list[dict[str, Any]] = []

    def say(line: str) -> None:
        if not as_json:
            print(line, flush=True)

    say(f"machine  {machine.name}")
    shown = ", ".join(str(4 * n) for n in counts[:4])
    more = f" ... {len(counts)} layers, {4 * sum(counts)} in all" if len(counts) > 4 else ""
    say(f"bytes    {shown}{more}")
    say(_HEAD)
    for choice in plans:
        began = time.perf_counter()
        outcome = simulate(
            machine,
            [Exchange(choice.plan, n, options=choice.options) for n in counts],
            begin=begin,
        )
        took = time.perf_counter() - began
        workspaces = {n: _workspace(choice, counts, n) for n in _LARGE}
        links = ", ".join(
            f"{name} {100 * busy / outcome.seconds:.0f} % {nbytes / 1e6:.0f} MB"
            for name, (nbytes, busy) in outcome.levels.items()
        )
        say(
            f"{choice!s:<34} {outcome.seconds * 1e3:>10.3f} "
            f"{100 * outcome.busiest_port / outcome.seconds:>11.0f} % {outcome.messages:>11} "
            f"{outcome.messages_of_rank:>7} {outcome.neighbours:>10} "
            f"{' / '.join(_megabytes(n) for n in workspaces.values()):>14} "
            f"{took:>11.1f} s   {links}"
        )
        rows.append(
            {
                "plan": str(choice),
                "seconds": outcome.seconds,
                "busiest_port_s": outcome.busiest_port,
                "messages": outcome.messages,
                "messages_of_rank": outcome.messages_of_rank,
                "neighbours": outcome.neighbours,
                "workspace_bytes": {str(n): nbytes for n, nbytes in workspaces.items()},
                "levels": {
                    name: {"bytes": nbytes, "busiest_link_s": busy}
                    for name, (nbytes, busy) in outcome.levels.items()
                },
                "simulated_in_s": took,
            }
        )
    return {"machine": machine.name, "bytes": [4 * n for n in counts], "plans": rows}


def _workspace(choice: Choice, counts: Sequence[int], n_ranks: int) -> int | None:
    """Return a plan's own bytes on each rank, over all layers; None: not for so many ranks."""
    if PLANS[choice.plan].mapped:
        return None  # ranks that map each other's memory are few
    try:
        return sum(
            times * workspace_bytes(Exchange(choice.plan, n, options=choice.options), n_ranks)
            for n, times in Counter(counts).items()
        )
    except PlanError:
        return None


def _megabytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:.1f}"


def choices(text: str) -> list[Choice]:
    """Parse plans such as "gdraa,chain(chunks=8)".

    ConfigError: no such plan or option, or a plan that does not exchange gradients.
    """
    found = []
    depth = start = 0
    for at, letter in enumerate(f"{text},"):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            name = re.match(r"\s*([a-z0-9_-]*)", text[start:at])
            assert name is not None
            if name[1] and name[1] not in PLANS:
                raise unknown_name(name[1], sorted(PLANS), "plan")
            policy = Policy.parse(f"allreduce:0-inf:{text[start:at]}")
            choice = policy.find("allreduce", 0)
            assert choice is not None and choice.plan in PLANS
            found.append(choice)
            start = at + 1
    if depth != 0:
        raise ConfigError(f"--plans {text[:100]!r}: a parenthesis too many, or too few")
    return found
