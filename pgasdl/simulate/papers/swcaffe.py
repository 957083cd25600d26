"""swCaffe: data-parallel training on supernodes of TaihuLight, to 1024 nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pgasdl.simulate.machine import Machine, supernodes
from pgasdl.simulate.papers.study import PaperTable, Study, figures, names
from pgasdl.simulate.program import Exchange
from pgasdl.simulate.run import simulate
from pgasdl.tools.chart import Chart, Series

NODES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PEAK = 12e9  # bytes per second between two nodes (section 2.2)


def taihulight(nodes: int, per_supernode: int, bandwidth: float) -> Machine:
    """Supernodes with a quarter of their bandwidth between them; sums at a core group's 28 GB/s."""
    return supernodes(
        nodes,
        per_group=per_supernode,
        oversubscription=4,
        latency=2e-6,
        bandwidth=bandwidth,
        startup=1e-6,
        name="taihulight",
        gamma=3 / 28e9,
    )


def allreduce_time(machine: Machine, nbytes: float, round_robin: int) -> float:
    """Return the seconds of a packed all-reduce; ``round_robin``: supernode size, 1: adjacent."""
    size = machine.size
    options = (("group_size", round_robin),) if 1 < round_robin < size else ()
    exchange = Exchange("halving-doubling", int(nbytes) // 4, options=options)
    return simulate(machine, [exchange]).seconds


def _bandwidth_for(seconds: float, nbytes: float, nodes: int, q: int) -> float:
    """Return the bandwidth at which an all-reduce takes so long: its time is linear in 1/b."""
    low, high = 1e9, PEAK
    at_low, at_high = (allreduce_time(taihulight(nodes, q, b), nbytes, q) for b in (low, high))
    per_inverse = (at_low - at_high) / (1 / low - 1 / high)
    return per_inverse / (seconds - at_high + per_inverse / high)


def _seconds(compute: float, share: float) -> float:
    """Return the time that is this share of an iteration with so much computation."""
    return compute * share / (1 - share)


def study() -> Study:
    """Reproduce figures 10 and 11, and the effect of the numbering."""
    paper = figures("swcaffe")
    q, last = paper["per_supernode"], paper["nodes"]
    # Its MB are of 2**20 bytes: AlexNet has 60,965,224 parameters.
    sizes = {model: mb * 2**20 for model, mb in paper["megabytes"].items()}
    # Computation does not depend on the number of nodes: each has its own sub-batch.
    compute = {
        (model, int(batch)): int(batch) / paper["table3"][model][2]
        for model, shares in paper["share"].items()
        for batch in shares
    }
    share = {key: paper["share"][key[0]][str(key[1])] / 100 for key in compute}
    implied = {key: _seconds(compute[key], share[key]) for key in compute}
    at_peak = {
        model: allreduce_time(taihulight(last, q, PEAK), nbytes, q)
        for model, nbytes in sizes.items()
    }
    # One point of the paper sets the bandwidth; everything else is prediction.
    anchor = ("alexnet", 256)
    bandwidth = _bandwidth_for(implied[anchor], sizes["alexnet"], last, q)
    times = {
        (model, nodes, numbering): allreduce_time(
            taihulight(nodes, q, bandwidth), sizes[model], numbering
        )
        for model in sizes
        for nodes in NODES
        for numbering in (1, q)
    }
    rows = []
    for (model, batch), seconds in compute.items():
        mine = times[model, last, q]
        rows.append(
            (
                model,
                batch,
                paper["share"][model][str(batch)],
                100 * mine / (mine + seconds),
                paper["speedup"][model][str(batch)],
                last * seconds / (mine + seconds),
                implied[model, batch],
                mine,
                at_peak[model],
            )
        )
    scaling = PaperTable(
        "1024 nodes: communication share and speed-up",
        names(
            "model | sub-batch | share %, paper | ours | speed-up, paper | ours | "
            "all-reduce s, implied by the paper | ours | ours at 12 GB/s"
        ),
        rows,
        [
            f"Bandwidth: at the 12 GB/s of the paper's section 2 an all-reduce takes "
            f"{at_peak['alexnet']:.2f} s (AlexNet); the paper's shares imply "
            f"{implied[anchor]:.2f} s. Ours is set to {bandwidth / 1e9:.2f} GB/s by one point, "
            "AlexNet with 256 images; everything else is prediction.",
            "AlexNet's other sub-batches follow within 4 points of share. ResNet-50 with 32 images "
            f"comes near; with 64 it does not: {paper['share']['resnet50']['64']} % of that "
            f"iteration are {implied['resnet50', 64]:.2f} s for the 97.7 MB that take "
            f"{implied['resnet50', 32]:.2f} s with 32 images. The paper does not say why.",
            "A misprint may be suspected: with the two sub-batches exchanged, the same all-reduce "
            f"takes {_seconds(compute['resnet50', 64], share['resnet50', 32]):.2f} and "
            f"{_seconds(compute['resnet50', 32], share['resnet50', 64]):.2f} s, and the larger "
            "sub-batch has the smaller share, as with AlexNet.",
        ],
    )
    numbering = PaperTable(
        "What round-robin numbering is worth (all-reduce, seconds)",
        ("model", "nodes", "adjacent", "round-robin", "gain"),
        [
            (model, nodes, adjacent, ours, adjacent / ours)
            for model in sizes
            for nodes in (256, 512, 1024)
            for adjacent, ours in [(times[model, nodes, 1], times[model, nodes, q])]
        ],
        ["The paper prints no times for it, only equations 3 to 6, which the plans' costs equal."],
    )
    return Study(
        "swcaffe",
        paper["source"],
        taihulight(last, q, bandwidth).name,
        [scaling, numbering, _striping(), *kernels(paper)],
        _charts(paper, compute, times, q),
    )


def _striping() -> PaperTable:
    """Count the readers of each disk array: 5.2's blocks, each process at a random place."""
    stripe, part, data = 256 << 20, 192 << 20, 256 << 30
    chance = np.random.default_rng(0)
    rows = []
    for nodes in (32, 128, 512, 1024):
        begin = chance.integers(0, data - part, nodes)
        first, second = begin // stripe, (begin + part - 1) // stripe
        beyond = np.where(first == second, 0, (begin + part) % stripe)
        for arrays in (1, 8, 32):
            load = np.bincount(first % arrays, part - beyond, arrays)
            load += np.bincount(second % arrays, beyond, arrays)
            readers = np.bincount(first % arrays, minlength=arrays)
            readers += np.bincount(second % arrays, beyond > 0, arrays).astype(np.int64)
            rows.append((nodes, arrays, int(readers.max()), 2 * nodes // arrays, load.max() / part))
    return PaperTable(
        "Striped input: 192 MB for each process, of blocks of 256 MB in turn on disk arrays",
        names(
            "processes | arrays | readers of the busiest array | 2 N / arrays, the paper's bound | "
            "time, of one process alone"
        ),
        rows,
        [
            "Every process reads from a random place of 256 GB (ours). The paper's bound holds on "
            "average: chance puts up to twice as many on one array. It prints no times.",
        ],
    )


def kernels(paper: dict[str, Any]) -> list[PaperTable]:
    """Compute the columns of tables 2 and 3 that follow from others."""
    batch, rows = paper["table2"]["batch"], []
    for name, (inputs, outputs, edge, *passes) in list(paper["table2"].items())[2:]:
        gigaflop = 2 * 9 * inputs * outputs * edge**2 * batch / 1e9
        row: list[object] = [name]
        for at in (0, 3, 6):
            times = [time for time in passes[at : at + 2] if time is not None]
            row += [passes[at + 2] or "-", gigaflop / min(times) if times else "-"]
        explicit, best = (
            sum(pick(t for t in passes[at : at + 2] if t) for at in (0, 3, 6) if passes[at + 1])
            for pick in (lambda times: list(times)[-1], min)
        )
        rows.append([*row, explicit, best])
    convolutions = PaperTable(
        "VGG-16's convolutions on a core group, Gflop/s (table 2)",
        names(
            "layer | forward, paper | computed | weights, paper | computed | inputs, paper | "
            "computed | explicit alone, s | faster of both, s"
        ),
        rows,
        [
            "Computed: multiplications and additions of the layer's shape, and 128 images, over "
            "the faster of the printed times. The times themselves, and figures 8 and 9, are "
            "outside: they need the kernels and the processor.",
            "The last columns add up the printed times: what it is worth to try both ways.",
        ],
    )
    titles = paper["table3"]["columns"]
    networks = PaperTable(
        "Images per second of one node (table 3)",
        ("network", *(f"{name}, paper" for name in titles), *titles[3:]),
        [
            (name, *row, row[2] / row[1], row[2] / row[0])
            for name, row in list(paper["table3"].items())[1:]
        ],
        [
            "Input of the tables above: SW. The last columns are computed. VGG-16's 5.13 is not "
            "6.21 / 1.06; the text's 3.04x to 7.84x leave out ResNet-50's 2.79.",
        ],
    )
    return [convolutions, networks]


Times = dict[tuple[str, int, int], float]
Computes = dict[tuple[str, int], float]


def _charts(paper: dict[str, Any], compute: Computes, times: Times, q: int) -> list[Chart]:
    def chart(
        key: str, title: str, unit: str, value: Callable[[float, float, int], float]
    ) -> Chart:
        series = [
            Series(
                f"{model}, {batch} images",
                NODES,
                [value(seconds, times[model, n, q], n) for n in NODES],
            )
            for (model, batch), seconds in compute.items()
        ]
        points = [each for by_batch in paper[key].values() for each in by_batch.values()]
        series.append(Series("paper", [NODES[-1]] * len(points), points, paper=True))
        log = key == "speedup"
        return Chart(f"swcaffe-{key}", title, "nodes", unit, series, log_y=log)

    return [
        chart(
            "speedup",
            "swCaffe's scaling, simulated",
            "speed-up",
            lambda alone, exchange, n: n * alone / (alone + exchange),
        ),
        chart(
            "share",
            "Communication's share of an iteration",
            "%",
            lambda alone, exchange, _: 100 * exchange / (alone + exchange),
        ),
    ]
