"""MiMatrix: GDRAA on the Manoa cluster, 1 to 32 workers (table 1)."""

from __future__ import annotations

from pgasdl import models
from pgasdl.simulate.machine import Machine, supernodes
from pgasdl.simulate.papers.study import Study, Table, figures
from pgasdl.simulate.program import Exchange
from pgasdl.simulate.run import simulate
from pgasdl.tools.chart import Chart, Series

FDR = 6e9  # bytes per second of one 56 Gbit/s adapter on 8 PCIe lanes
# One worker's iteration: 64 images on each P100, about 200 images a second.
COMPUTE = 64 / 200


def manoa(workers: int, bandwidth: float) -> Machine:
    """One adapter per worker, one switch. GPUs reduce at some 300 GB/s."""
    return supernodes(
        workers,
        per_group=1,
        oversubscription=1,
        latency=2e-6,
        bandwidth=bandwidth,
        startup=0.7e-6,
        name="manoa",
        gamma=1 / 100e9,
    )


def study() -> Study:
    """Reproduce table 1."""
    paper = figures("mimatrix")
    count = sum(models.layers("resnet50"))
    workers = [int(n) for n in paper["scaling"]]

    def exchange(n: int, bandwidth: float) -> float:
        if n == 1:
            return 0.0
        return simulate(manoa(n, bandwidth), [Exchange("gdraa", count)]).seconds

    def scaling(n: int, bandwidth: float) -> float:
        return n * COMPUTE / (COMPUTE + exchange(n, bandwidth))

    # The time of an exchange that the paper's speed-up implies, in parts of the computation.
    implied = {n: n / paper["scaling"][str(n)] - 1 for n in workers}
    bandwidth = FDR * exchange(2, FDR) / (implied[2] * COMPUTE)
    rows = [
        (
            n,
            paper["minutes"][str(n)],
            paper["minutes"]["1"] / scaling(n, bandwidth),
            paper["scaling"][str(n)],
            scaling(n, bandwidth),
            scaling(n, FDR),
            1e3 * implied[n] * COMPUTE,
            1e3 * exchange(n, bandwidth),
        )
        for n in workers
    ]
    table = Table(
        "ResNet-50 to 65 %, 4 GPUs a worker (table 1)",
        (
            "workers",
            "minutes, paper",
            "ours",
            "scaling, paper",
            "ours",
            "ours at FDR's rate",
            "exchange ms, implied",
            "ours",
        ),
        rows,
        [
            f"Computation: {COMPUTE:.2f} s an iteration, an estimate (P100, 64 images): the paper "
            "prints none. Only its ratio to the exchange matters.",
            f"Bandwidth {bandwidth / 1e9:.1f} GB/s, set by the row of 2 workers; FDR would give "
            "6. The paper does not say what separates them; we let nothing overlap with "
            "computation.",
            "4 to 16 workers follow within a few per cent: the exchange's bytes hardly depend on "
            "the number of workers, which is the paper's point.",
            "32 workers do not: the paper's minutes (333 after 430) need three times the exchange "
            "of 16 workers, where its own proof has the same. Its figure 1 has 16 servers, so two "
            "workers share one; we simulate each with an adapter of its own.",
        ],
    )
    chart = Chart(
        "mimatrix-scaling",
        "MiMatrix, ResNet-50: scaling",
        "workers",
        "speed-up",
        [
            Series("ideal", workers, workers),
            Series("ours, bandwidth from 2 workers", workers, [row[4] for row in rows]),
            Series("ours, FDR's rate", workers, [row[5] for row in rows]),
            Series("paper", workers, [paper["scaling"][str(n)] for n in workers], paper=True),
        ],
    )
    return Study("mimatrix", paper["source"], manoa(32, bandwidth).name, [table], [chart])
