"""CaffeGPI: AlexNet on up to 4 nodes, exchanged in turns during the backward pass; table 1."""

from __future__ import annotations

from typing import Any

from pgasdl import models
from pgasdl.simulate.machine import Machine, flat
from pgasdl.simulate.papers.study import PaperTable, Study, figures
from pgasdl.simulate.program import Exchange
from pgasdl.simulate.run import Action, Compute, Join, Start, simulate
from pgasdl.tools.chart import Chart, Series

# Multiplications of AlexNet's layers, first to last, in millions per image: they take the time.
WORK = (105, 224, 150, 112, 75, 38, 17, 4)
NODES = (1, 2, 4)
FDR = 6e9
# Estimates, bytes per second: a core's memory, and copies between GPU and host.
MEMORY, PCIE = 24e9, 12e9
ITERATIONS = 3


def taurus(nodes: int, *, turns: bool = False) -> Machine:
    """One K80 per node, FDR InfiniBand; the processor adds (3 passes) and updates (5 passes)."""
    return flat(
        nodes,
        latency=2e-6,
        bandwidth=FDR,
        startup=0.5e-6,
        gamma=3 / MEMORY,
        update=5 / MEMORY,
        turns=turns,
    )


def iteration_time(
    machine: Machine, batch_seconds: float, plan: str, *, how: str, copies: bool = False
) -> float:
    """Return the seconds of one iteration in steady state.

    ``how``: exchanges start "after" the backward pass or in it, by "layers"; each is waited for
    just before its next use, or all at the end of the iteration ("finalize", the paper's).
    ``copies``: gradients go to the host, and weights to the GPU, before and after each exchange.
    """
    layers = models.layers("alexnet")  # weights and biases, last layer first
    alone = machine.size == 1
    seconds = [batch_seconds / machine.size * work / sum(WORK) for work in WORK]
    counts = [layers[2 * at : 2 * at + 2] for at in reversed(range(len(WORK)))]
    copied = [4 * sum(pair) / PCIE if copies and not alone else 0.0 for pair in counts]
    exchanges: list[Exchange] = []
    actions: list[Action] = []
    under_way: list[list[Action]] = [[] for _ in WORK]
    for _ in range(ITERATIONS):
        for layer, time in enumerate(seconds):
            actions += [*under_way[layer], Compute(time / 3 + copied[layer])]
            under_way[layer] = []
        late: list[Action] = []
        for layer in reversed(range(len(WORK))):
            actions.append(Compute(seconds[layer] * 2 / 3 + copied[layer]))
            for count in () if alone else counts[layer]:
                (late if how == "after" else actions).append(Start(len(exchanges)))
                under_way[layer].append(Join(len(exchanges)))
                exchanges.append(Exchange(plan, count, kind="update"))
        actions += late
        if how != "layers":
            actions += [join for joins in reversed(under_way) for join in joins]
            under_way = [[] for _ in WORK]
    actions += [join for joins in under_way for join in joins]
    moments = simulate(machine, exchanges, actions).moments
    return float(moments[-1].max()) / ITERATIONS


# What of the paper's exchange is modelled: plan, turns, how, copies.
VARIANTS: dict[str, tuple[str, bool, str, bool]] = {
    "after the backward pass, tree": ("tree", False, "after", False),
    "layer by layer, tree": ("tree", False, "layers", False),
    "as the paper: all awaited at the end": ("tree", False, "finalize", False),
    "and progress at turns alone": ("tree", True, "finalize", False),
    "and copies to and from the host": ("tree", True, "finalize", True),
    "layer by layer, gdraa": ("gdraa", False, "layers", False),
    "gdraa, turns and copies": ("gdraa", True, "layers", True),
}
PAPERS = "and copies to and from the host"


def speedups(alone: float, name: str) -> list[float]:
    """Return the speed-ups of a variant on ``NODES``; ``alone``: seconds on one."""
    plan, turns, how, copies = VARIANTS[name]
    return [
        alone / iteration_time(taurus(n, turns=turns), alone, plan, how=how, copies=copies)
        for n in NODES
    ]


def study() -> Study:
    """Reproduce the speed-up, step by step, and table 1."""
    paper = figures("caffegpi")
    alone = paper["table1"]["AlexNet"]["seconds"][paper["gpus"].index("K80")]
    found = {name: speedups(alone, name) for name in VARIANTS}
    printed = paper["speedup"]["4"]
    table = PaperTable(
        "AlexNet, 256 images over all nodes: speed-up over one node (figure 6)",
        ("exchange", *(f"{nodes} nodes" for nodes in NODES), "4 nodes, paper"),
        [(name, *row, printed if name == PAPERS else "-") for name, row in found.items()],
        [
            f"Input of the paper: {alone} s for an iteration on one K80 (table 1), FDR. Estimates "
            f"of ours: {MEMORY / 1e9:.0f} GB/s for a core's memory (an addition takes 3 passes, "
            f"an update 5), {PCIE / 1e9:.0f} GB/s between GPU and host. Nothing is fitted to 2.4.",
            "Turns (figure 3): the thread that computes also adds, updates and sends on, once a "
            "layer; the root adds two ranks' gradients, and updates. Copies are interleaved with "
            "computation, not overlapped (section 4).",
            "Left out: a quarter of the batch takes a quarter of the time, which no GPU does at 64 "
            "images; reading images.",
            "The paper prints one figure, 2.4 on 4 nodes, and draws the rest.",
        ],
    )
    chart = Chart(
        "caffegpi-overlap",
        "AlexNet: what overlapping the exchange is worth",
        "nodes",
        "speed-up",
        [
            Series("ideal", NODES, NODES),
            *(Series(name, NODES, values) for name, values in found.items()),
            Series("paper", [4], [printed], paper=True),
        ],
        log_y=False,
    )
    tables = [table, _convergence(paper)]
    return Study("caffegpi", paper["source"], taurus(4).name, tables, [chart])


def _convergence(paper: dict[str, Any]) -> PaperTable:
    rows = [
        (network, kind, row["batch"], seconds, hours, seconds * row["kilo_iterations"] / 3.6)
        for network, row in paper["table1"].items()
        for kind, seconds, hours in zip(paper["gpus"], row["seconds"], row["hours"], strict=True)
        if seconds is not None
    ]
    return PaperTable(
        "Time till convergence (table 1)",
        ("network", "on", "batch", "s an iteration, paper", "hours, paper", "computed"),
        rows,
        [
            "Computed: the paper's seconds times its iterations (450k, 1400k and 2000k). Its hours "
            "of GoogLeNet are those of 1000k iterations, but for the P100's.",
            "The seconds themselves are outside: they need these processors and their kernels.",
        ],
    )
