"""``pgasdl sim``: plans on modelled machines, and the papers' experiments."""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from pgasdl import models
from pgasdl.collectives.policy import Choice, Policy
from pgasdl.config import Config
from pgasdl.errors import ConfigError
from pgasdl.plans import PLANS, plugins
from pgasdl.tools.simulate.machine import MACHINES
from pgasdl.tools.simulate.papers import STUDIES
from pgasdl.tools.simulate.program import Exchange
from pgasdl.tools.simulate.run import simulate
from pgasdl.tools.sizes import parse_names, parse_size

_DESCRIPTION = """\
Simulates exchanges event by event on a modelled machine: ports, over-subscribed links, additions,
ranks that are late. Nothing is measured; `pgasdl bench` measures.

  pgasdl sim -n 1024 --machine supernodes --plans gdraa,halving-doubling(group_size=256)
  pgasdl sim --paper s-caffe,swcaffe --out DIR      the papers' runs, their figures beside ours
"""
_LARGEST = 1 << 16


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("-n", dest="n_ranks", type=int, default=64, metavar="N", help="ranks (64)")
    parser.add_argument(
        "--machine", default="flat", choices=sorted(MACHINES), help="modelled machine (flat)"
    )
    parser.add_argument(
        "--plans", default="gdraa,halving-doubling,ring,tree", metavar="LIST",
        help="plans, with options in parentheses",
    )  # fmt: skip
    parser.add_argument(
        "--plan-modules", metavar="LIST",
        help="modules or .py files that register more plans, by commas (PGASDL_PLAN_MODULES)",
    )  # fmt: skip
    parser.add_argument("--size", metavar="BYTES", help="one array of so many bytes (16M)")
    parser.add_argument("--model", metavar="M", help="or a network's layers, each alone")
    parser.add_argument(
        "--skew", type=float, default=0.0, metavar="US",
        help="ranks begin up to so many microseconds late (0)",
    )  # fmt: skip
    parser.add_argument("--paper", metavar="LIST", help=f"{', '.join(STUDIES)}, or all")
    parser.add_argument("--out", default="pgasdl-sim", metavar="DIR", help="of --paper")
    parser.set_defaults(handler=run)


def run(given: argparse.Namespace) -> int:
    """Simulate; returns the exit status."""
    if given.paper is not None:
        for name in parse_names(given.paper, tuple(STUDIES), "paper"):
            study = STUDIES[name]()
            print(study)
            print("\n".join(study.write(Path(given.out))), end="\n\n", flush=True)
        return 0
    if not 1 <= given.n_ranks <= _LARGEST:
        raise ConfigError(f"-n {given.n_ranks}: 1 to {_LARGEST} ranks")
    if given.size is not None and given.model is not None:
        raise ConfigError("--size and --model: one of them")
    if not 0 <= given.skew <= 1e9:
        raise ConfigError(f"--skew {given.skew}: microseconds, from 0 to 1e9")
    if given.model is None:
        counts: tuple[int, ...] = (parse_size(given.size or "16M") // 4,)
    else:
        (name,) = parse_names(given.model, models.NAMES, "model")
        counts = models.layers(name)
    config = Config.from_environment(plan_modules=given.plan_modules)
    plugins.load(config.plan_modules or "")
    plans = choices(given.plans)
    machine = MACHINES[given.machine](given.n_ranks)
    generator = random.Random(0)  # noqa: S311
    begin = [generator.uniform(0, given.skew * 1e-6) for _ in range(given.n_ranks)]
    print(f"machine  {machine.name}")
    shown = ", ".join(str(4 * n) for n in counts[:4])
    more = f" ... {len(counts)} layers, {4 * sum(counts)} in all" if len(counts) > 4 else ""
    print(f"bytes    {shown}{more}")
    head = f"{'plan':<34} {'ms':>10} {'busiest port':>13} {'messages':>11} {'simulated in':>13}"
    print(f"{head}   busiest link and bytes met, by level")
    for choice in plans:
        began = time.perf_counter()
        outcome = simulate(
            machine,
            [Exchange(choice.plan, n, options=choice.options) for n in counts],
            begin=begin,
        )
        links = ", ".join(
            f"{name} {100 * busy / outcome.seconds:.0f} % {nbytes / 1e6:.0f} MB"
            for name, (nbytes, busy) in outcome.levels.items()
        )
        print(
            f"{choice!s:<34} {outcome.seconds * 1e3:>10.3f} "
            f"{100 * outcome.busiest_port / outcome.seconds:>11.0f} % {outcome.messages:>11} "
            f"{time.perf_counter() - began:>11.1f} s   {links}",
            flush=True,
        )
    return 0


def choices(text: str) -> list[Choice]:
    """Plans of "gdraa,chain(chunks=8)".

    Raises
    ------
    ConfigError
        No such plan or option, or one that does not exchange gradients.
    """
    found = []
    depth = start = 0
    for at, letter in enumerate(f"{text},"):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            policy = Policy.parse(f"allreduce:0-inf:{text[start:at]}")
            choice = policy.find("allreduce", 0)
            assert choice is not None and choice.plan in PLANS
            found.append(choice)
            start = at + 1
    if depth != 0:
        raise ConfigError(f"--plans {text[:100]!r}: a parenthesis too many, or too few")
    return found
