"""Measure the times of the picture of the tutorial "overlap": overlap.json, beside this file.

pgasdl run -n 2 .github/docs/pictures/overlap_run.py && python .github/docs/pictures/drawings.py

The loop is that of apps/cookbook/overlap.py, with a clock. Of all iterations one of the shortest
tenth is kept, which other programs on these cores have disturbed little.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np

import pgasdl

LAYERS, WIDTH, ITERATIONS = 8, 2048, 100
BACKWARD, FORWARD = 0.002, 0.001  # seconds of a layer, in place of an accelerator's


def iteration(exchange: pgasdl.GradientExchange, rank: int) -> dict[str, np.ndarray]:
    """Return when each layer's backward, exchange, wait and next forward began and ended."""
    spans = {kind: np.zeros((LAYERS, 2)) for kind in ("backward", "waiting", "forward", "exchange")}
    for layer in reversed(range(LAYERS)):
        spans["backward"][layer, 0] = time.monotonic()
        time.sleep(BACKWARD)
        exchange.gradient(layer)[0] = rank
        spans["backward"][layer, 1] = time.monotonic()
        exchange.ready(layer)
    for layer in range(LAYERS):
        spans["waiting"][layer, 0] = time.monotonic()
        exchange.wait(layer)
        spans["waiting"][layer, 1] = spans["forward"][layer, 0] = time.monotonic()
        timing = exchange.timing(layer)
        spans["exchange"][layer] = timing.began, timing.ended
        time.sleep(FORWARD)
        spans["forward"][layer, 1] = time.monotonic()
    return spans


def main() -> None:
    """Run all iterations; rank 0 writes the chosen one of all ranks."""
    with pgasdl.init(log="warning", progress="thread") as ctx:
        exchange = pgasdl.GradientExchange(ctx, [((WIDTH, WIDTH), np.float32)] * LAYERS)
        ctx.barrier()
        found = [iteration(exchange, ctx.rank) for _ in range(ITERATIONS)]
        length = np.array([each["forward"].max() - each["backward"].min() for each in found])
        ctx.allreduce(length)  # all ranks choose the same iteration
        chosen = found[int(np.argsort(length)[ITERATIONS // 10])]
        kinds = sorted(chosen)
        mine = np.zeros((ctx.size, len(kinds), LAYERS, 2))
        mine[ctx.rank] = [chosen[kind] for kind in kinds]
        ctx.allreduce(mine)
        mine -= mine[:, kinds.index("backward")].min()
    if ctx.rank == 0:
        ranks = [
            {kind: (1e3 * spans).round(3).tolist() for kind, spans in zip(kinds, rank, strict=True)}
            for rank in mine
        ]
        about = {
            "layers": f"{LAYERS} layers of {WIDTH * WIDTH * 4 >> 20} MiB",
            "where": f"{ctx.size} ranks, {os.cpu_count()} cores, shm; sleeps as compute",
            "ranks": ranks,
        }
        path = Path(__file__).with_name("overlap.json")
        path.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
