"""dMath and Expresso: links, products of matrices, and networks whose wide layers are spread."""

from __future__ import annotations

from typing import Any

import numpy as np

from pgasdl import models
from pgasdl.matrix.choice import choose
from pgasdl.matrix.layout import Layout, columns, rows
from pgasdl.plans.cost import Model, Pair
from pgasdl.simulate.machine import Machine, supernodes
from pgasdl.simulate.papers.study import PaperTable, Study, figures, names
from pgasdl.simulate.program import Exchange
from pgasdl.simulate.run import simulate
from pgasdl.tools.chart import Chart, Series

# Multiplications of the convolutions in millions per image, and the linear layers' shapes.
NETWORKS = {
    "AlexNet": (666, ((9216, 4096), (4096, 4096), (4096, 1000))),
    "GoogLeNet": (1498, ((1024, 1000),)),
}
GPUS = (1, 2, 4, 8, 16, 32, 64)
# Columns of tables I and II.
HOST, SHARED, INTRANODE, INTERNODE, P2P = range(5)
# Cost of a message between two nodes: table I, for 16384 bytes.
STARTUP = 16.74e-6


def message(nbytes: float, medium: int) -> float:
    """Return the seconds of a message: table I, straight lines between its sizes, then table II."""
    paper = figures("dmath")
    sizes = [int(size) for size in paper["microseconds"]]
    times = [row[medium] * 1e-6 for row in paper["microseconds"].values()]
    beyond = max(0.0, nbytes - sizes[-1]) / _bandwidth(medium)
    return float(np.interp(nbytes, sizes, times)) + beyond


def _bandwidth(medium: int) -> float:
    return float(figures("dmath")["megabytes_per_second"]["4194304"][medium]) * 1e6


def cyclic(n: int, gpus: int, seconds_alone: float) -> float:
    """Return the seconds of the paper's product, section III.D, of square matrices.

    Each of ``gpus`` outer stages has as many inner ones, in which a GPU multiplies one block, and
    passes it on: the next outer stage begins when both are done. The slowest neighbours decide.
    """
    block = 4 * (n / gpus) ** 2
    media = [P2P] if gpus <= 4 else [INTRANODE] if gpus <= 8 else [INTRANODE, INTERNODE]
    moved = max(message(block, medium) for medium in media)
    multiplied = seconds_alone / gpus**3
    return gpus * ((gpus - 1) * max(moved, multiplied) + multiplied)


def model(flop: float) -> Model:
    """Return the machine: PCIe from GPU to GPU, EDR between nodes (table II)."""
    inside = Pair(1e-6, 1 / _bandwidth(P2P), STARTUP)
    across = Pair(1.3e-6, 1 / _bandwidth(INTERNODE), STARTUP)
    per_node = figures("dmath")["gpus_per_node"]
    return Model(inside, across, per_node, gamma=1 / 100e9, flop=flop)


def product(a: Layout, b: Layout, gpus: int, machine: Model, wanted: Layout | None = None) -> float:
    """Return the seconds of a product, made where the least is to be moved."""
    return choose(a, b, gpus, wanted, None, 4, False, machine).seconds


def square(n: int, gpus: int, seconds_alone: float) -> float:
    """Return the seconds of pgasdl's product of square matrices by rows."""
    layout = rows((n, n), range(gpus))
    return product(layout, layout, gpus, model(seconds_alone / n**3))


def cluster(gpus: int) -> Machine:
    """Return the same machine, whose GPUs share nothing but the switch."""
    return supernodes(
        gpus,
        per_group=figures("dmath")["gpus_per_node"],
        oversubscription=1,
        latency=1.3e-6,
        bandwidth=_bandwidth(INTERNODE),
        startup=STARTUP,
        name="Expresso's",
        gamma=1 / 100e9,
    )


def exchange(gpus: int, count: int) -> float:
    """Return the seconds in which gradients are averaged."""
    return simulate(cluster(gpus), [Exchange("gdraa", count)]).seconds if gpus > 1 else 0.0


def rate(
    batch: int, gpus: int, images_per_second: float, *, spread: bool, network: str = "AlexNet"
) -> float:
    """Return the network's images per second; ``images_per_second``: of one GPU.

    A third of a layer's time is forward. Nothing of an exchange is hidden.
    """
    convolutions, linear = NETWORKS[network]
    weights = [m * n for m, n in linear]
    work = convolutions * 1e6 + sum(weights)
    flop = 1 / images_per_second / (3 * work)
    count = sum(models.layers(network.lower()))
    if not spread:
        return batch / (3 * work * flop * batch / gpus + exchange(gpus, count))
    machine, ranks = model(flop), range(gpus)
    seconds = 3 * convolutions * 1e6 * flop * batch / gpus
    seconds += exchange(gpus, count - sum(weights))
    for inputs, outputs in linear:
        x, y = rows((batch, inputs), ranks), rows((batch, outputs), ranks)
        weight = rows((outputs, inputs), ranks)
        seconds += product(x, weight.T, gpus, machine, y)
        seconds += product(y, weight, gpus, machine, x)
        seconds += product(y.T, columns((batch, inputs), ranks), gpus, machine, weight)
    return batch / seconds


def _links(paper: dict[str, Any]) -> PaperTable:
    rows = []
    for size, measured in list(paper["microseconds"].items())[2:]:
        cells: list[object] = [size]
        for medium in (INTERNODE, P2P):
            line = paper["microseconds"]["1"][medium] + 1e6 * int(size) / _bandwidth(medium)
            cells += [measured[medium], line]
        rows.append(cells)
    return PaperTable(
        "Messages, microseconds (tables I and II)",
        names("bytes | internode EDR GDR, paper | line | CUDA P2P, paper | line"),
        rows,
        [
            "Both tables are input: table I for the paper's own product below, table II's last row "
            "for all else. The line is table I's row of 1 byte and table II's last row: table II "
            "has several messages under way, so one alone takes longer than its line.",
        ],
    )


def _training(paper: dict[str, Any], key: str, name: str) -> tuple[PaperTable, Chart]:
    network, batch = key.split(", ")
    printed, others = paper["images_per_second"][key], paper["other_batch"][key]
    kinds = ("expresso", "nv-caffe")
    ours = {
        kind: [
            rate(int(batch), n, printed[kind]["1"], spread=kind == "expresso", network=network)
            for n in GPUS
        ]
        for kind in kinds
    }

    def shown(kind: str, n: str) -> str:
        if n not in printed[kind]:
            return "-"
        mark = paper["asterisks"][key].get(kind, {}).get(n, "")
        return f"{mark}{printed[kind][n]}" + (f" (of {others[n]})" if n in others else "")

    notes = [
        "Input: the first row, and tables I and II. Spread: dMath and Expresso, hybrid; "
        "data-parallel: nv-caffe, within one machine.",
        "Left out: a GPU keeps the rate that it has alone, which none does with a few images; "
        "reading images, and the memory of convolutions, cost nothing. So ours is above both from "
        "8 GPUs on.",
    ]
    if others:
        notes.append(f"In parentheses: the paper's batch, where it is not {batch}.")
    if paper["asterisks"][key]:
        notes.append("* no memory for the best convolutions; ** memory is allocated anew (paper).")
    table = PaperTable(
        f"{network}, images per second, {batch} images an iteration ({name})",
        ("GPUs", "spread, paper", "ours", "data-parallel, paper", "ours"),
        [
            (
                n,
                shown(kinds[0], str(n)),
                ours[kinds[0]][at],
                shown(kinds[1], str(n)),
                ours[kinds[1]][at],
            )
            for at, n in enumerate(GPUS)
        ],
        notes,
    )
    chart = Chart(
        f"dmath-{network.lower()}-{batch}",
        f"{network}, {batch} images: wide layers spread, or data-parallel",
        "GPUs",
        "images per second",
        [
            Series("spread", GPUS, ours["expresso"]),
            Series("data-parallel", GPUS, ours["nv-caffe"]),
            Series("spread, paper", GPUS, list(printed["expresso"].values()), paper=True),
        ],
    )
    return table, chart


def products(paper: dict[str, Any]) -> PaperTable:
    """Compare table V with the paper's algorithm on its links, and with pgasdl's product."""
    printed = {size: row for size, row in paper["gemm_seconds"].items() if size.isdigit()}
    ways = ((2, 1), (8, 3), (32, 5))  # GPUs, and dMath's column
    largest = max(int(size) for size, row in printed.items() if row[0] is not None)
    found = []
    for size, row in printed.items():
        n = int(size)
        alone = row[0] or printed[str(largest)][0] * (n / largest) ** 3
        cells: list[object] = [n, "-" if row[0] is None else row[0]]
        for gpus, at in ways:
            cells.append("-" if row[at] is None else row[at])
            cells += [cyclic(n, gpus, alone), square(n, gpus, alone)]
        found.append(cells)
    return PaperTable(
        "Products of square matrices, seconds (table V)",
        names(
            "size | 1 GPU, paper | 2 GPUs, paper | its algorithm | pgasdl's | 8 GPUs, paper | "
            "its algorithm | pgasdl's | 32 GPUs, paper | its algorithm | pgasdl's"
        ),
        found,
        [
            "Input: the first column, from which a GPU's rate follows (above 24576 the paper has "
            "none: the rate of that row), and tables I and II.",
            "Its algorithm (section III.D, blocks as in VII.B): 32 stages of 32 blocks, each a "
            "message. At 4096 a block has 64 KiB, so 32 GPUs send 992 messages that take longer "
            "than their products: more than 8 GPUs need for all. So 32 lose, as printed.",
            "Left out: products of small blocks run slower than the first column's (the paper "
            "says so), and each stage is waited for by the host: at 4096 the paper's 32 GPUs take "
            f"{1e6 * printed['4096'][5] / 1024:.0f} us a block, of which table I has "
            f"{1e6 * message(65536, INTRANODE):.0f}.",
            "pgasdl's: what the links of table II allow if all of a panel is one message, and "
            "every transfer hides behind a product. cublasXt's columns are another library's.",
        ],
    )


def study() -> Study:
    """Reproduce tables I to V."""
    paper = figures("dmath")
    trainings = [
        _training(paper, key, name)
        for key, name in (
            ("AlexNet, 1024", "table III"),
            ("AlexNet, 256", "table IV"),
            ("GoogLeNet, 1024", "table III"),
        )
    ]
    tables = [*(table for table, _ in trainings), _links(paper), products(paper)]
    charts = [chart for _, chart in trainings]
    return Study("dmath", paper["source"], cluster(64).name, tables, charts)
