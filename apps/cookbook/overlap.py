"""Overlap in a NumPy loop: a layer's gradient travels while the next layer's is computed.

pgasdl run -n 3 apps/cookbook/overlap.py
"""

import argparse
import time

import numpy as np

import pgasdl

LAYERS, WIDTH, ITERATIONS = 8, 2048, 10


def compute() -> None:
    """Stand in for backward of a layer on an accelerator: the processor is free meanwhile."""
    time.sleep(0.002)


argparse.ArgumentParser(description=__doc__).parse_args()
# The thread moves exchanges on while the program does something else.
with pgasdl.init(log="warning", progress="thread") as ctx:
    exchange = pgasdl.GradientExchange(ctx, [((WIDTH, WIDTH), np.float32)] * LAYERS)
    seconds = {}
    for overlapped in (False, True):
        ctx.barrier()
        began = time.perf_counter()
        for iteration in range(ITERATIONS):
            for layer in reversed(range(LAYERS)):  # backward
                compute()
                exchange.gradient(layer)[0] = ctx.rank + iteration  # a row stands for all
                exchange.ready(layer)
                if not overlapped:
                    exchange.wait(layer)
            for layer in range(LAYERS):  # forward of the next iteration
                if overlapped:
                    exchange.wait(layer)
                assert exchange.gradient(layer)[0, 0] == iteration + (ctx.size - 1) / 2
        seconds[overlapped] = (time.perf_counter() - began) / ITERATIONS
    if ctx.rank == 0:
        print(
            f"an iteration: {seconds[False] * 1e3:.1f} ms one after the other, "
            f"{seconds[True] * 1e3:.1f} ms overlapped, {LAYERS * 2.0:.1f} ms of compute"
        )
