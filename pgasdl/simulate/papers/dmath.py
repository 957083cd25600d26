"""dMath and Expresso: products of matrices, and AlexNet with its wide layers spread over GPUs."""

from __future__ import annotations

from pgasdl import models
from pgasdl.matrix.choice import choose
from pgasdl.matrix.layout import Layout, columns, rows
from pgasdl.plans.cost import Model, Pair
from pgasdl.simulate.machine import Machine, supernodes
from pgasdl.simulate.papers.study import Study, Table, figures
from pgasdl.simulate.program import Exchange
from pgasdl.simulate.run import simulate
from pgasdl.tools.chart import Chart, Series

# Multiplications of AlexNet's convolutions in millions per image, and the linear layers' shapes.
CONVOLUTIONS = 666
LINEAR = ((9216, 4096), (4096, 4096), (4096, 1000))
GPUS = (1, 2, 4, 8, 16, 32, 64)
_NOTES = (
    "Spread: dMath and Expresso, hybrid; data-parallel: nv-caffe, within one machine.",
    "Ours is above both from 8 GPUs on: a GPU keeps the rate that it has alone, which none does "
    "with a few images; input, and convolutions' memory, cost nothing.",
    "The order is the paper's: spreading the layers pays at any number of GPUs.",
)
# Cost of a message between GPUs: table I, for 16 KB.
STARTUP = 15e-6


def model(flop: float) -> Model:
    """Return the machine: PCIe from GPU to GPU, EDR between nodes (table II)."""
    paper = figures("dmath")
    inside, across = (1 / paper["bytes_per_second"][way] for way in ("p2p", "edr"))
    pairs = Pair(1e-6, inside, STARTUP), Pair(1.3e-6, across, STARTUP)
    return Model(*pairs, per_node=paper["gpus_per_node"], gamma=1 / 100e9, flop=flop)


def product(a: Layout, b: Layout, gpus: int, machine: Model, wanted: Layout | None = None) -> float:
    """Return the seconds of a product, made where the least is to be moved."""
    return choose(a, b, gpus, wanted, None, 4, False, machine).seconds


def square(n: int, gpus: int, seconds_alone: float) -> float:
    """Return the seconds of a product of square matrices by rows."""
    layout = rows((n, n), range(gpus))
    return product(layout, layout, gpus, model(seconds_alone / n**3))


def cluster(gpus: int) -> Machine:
    """Return the same machine, whose GPUs share nothing but the switch."""
    paper = figures("dmath")
    return supernodes(
        gpus,
        per_group=paper["gpus_per_node"],
        oversubscription=1,
        latency=1.3e-6,
        bandwidth=paper["bytes_per_second"]["edr"],
        startup=STARTUP,
        name="Expresso's",
        gamma=1 / 100e9,
    )


def exchange(gpus: int, count: int) -> float:
    """Return the seconds in which gradients are averaged."""
    return simulate(cluster(gpus), [Exchange("gdraa", count)]).seconds if gpus > 1 else 0.0


def rate(batch: int, gpus: int, images_per_second: float, *, spread: bool) -> float:
    """Return AlexNet's images per second; ``images_per_second``: of one GPU.

    A third of a layer's time is forward. Nothing of an exchange is hidden.
    """
    weights = [m * n for m, n in LINEAR]
    work = CONVOLUTIONS * 1e6 + sum(weights)
    flop = 1 / images_per_second / (3 * work)
    count = sum(models.layers("alexnet"))
    if not spread:
        return batch / (3 * work * flop * batch / gpus + exchange(gpus, count))
    machine, ranks = model(flop), range(gpus)
    seconds = 3 * CONVOLUTIONS * 1e6 * flop * batch / gpus
    seconds += exchange(gpus, count - sum(weights))
    for inputs, outputs in LINEAR:
        x, y = rows((batch, inputs), ranks), rows((batch, outputs), ranks)
        weight = rows((outputs, inputs), ranks)
        seconds += product(x, weight.T, gpus, machine, y)
        seconds += product(y, weight, gpus, machine, x)
        seconds += product(y.T, columns((batch, inputs), ranks), gpus, machine, weight)
    return batch / seconds


def study() -> Study:
    """Reproduce tables III to V."""
    paper = figures("dmath")
    tables, charts = [], []
    for batch, name in ((1024, "table III"), (256, "table IV")):
        printed = paper["alexnet_images_per_second"][str(batch)]
        ours = {
            kind: [rate(batch, n, printed[kind]["1"], spread=kind == "expresso") for n in GPUS]
            for kind in ("expresso", "nv-caffe")
        }
        rows_of = [
            (
                n,
                printed["expresso"][str(n)],
                ours["expresso"][at],
                printed["nv-caffe"].get(str(n), "-"),
                ours["nv-caffe"][at],
            )
            for at, n in enumerate(GPUS)
        ]
        tables.append(
            Table(
                f"AlexNet, images per second, {batch} images an iteration ({name})",
                ("GPUs", "spread, paper", "ours", "data-parallel, paper", "ours"),
                rows_of,
                _NOTES,
            )
        )
        charts.append(
            Chart(
                f"dmath-alexnet-{batch}",
                f"AlexNet, {batch} images: wide layers spread, or data-parallel",
                "GPUs",
                "images per second",
                [
                    Series("spread", GPUS, ours["expresso"]),
                    Series("data-parallel", GPUS, ours["nv-caffe"]),
                    Series(
                        "spread, paper",
                        GPUS,
                        [printed["expresso"][str(n)] for n in GPUS],
                        paper=True,
                    ),
                ],
            )
        )
    seconds = paper["gemm_seconds"]
    tables.append(
        Table(
            "Products of square matrices, seconds (table V)",
            (
                "size",
                "1 GPU, paper",
                *(word for n in (2, 8, 32) for word in (f"{n} GPUs, paper", "ours")),
            ),
            [
                (
                    size,
                    each["1"],
                    *(
                        value
                        for n in (2, 8, 32)
                        for value in (each[str(n)], square(int(size), n, each["1"]))
                    ),
                )
                for size, each in seconds.items()
            ],
            [
                "The rate of a GPU is that of the row's first column, so ours is what the links "
                "of table II allow if every transfer hides behind a product: it says how far the "
                "paper's are from that.",
            ],
        )
    )
    return Study("dmath", paper["source"], cluster(64).name, tables, charts)
