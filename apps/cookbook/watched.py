"""A training that a job server watches and stops.

pgasdl job submit -n 2 apps/cookbook/watched.py; pgasdl run -n 2 does as well
"""

import argparse
import time

import numpy as np

import pgasdl
import pgasdl.jobs

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("iterations", type=int, nargs="?", default=2000)
ITERATIONS = parser.parse_args().iterations
NUMBERS = 1000

with pgasdl.init(log="warning") as ctx, pgasdl.jobs.connect(ctx) as job:
    # The last elements carry the number of the last command to all ranks.
    exchange = pgasdl.GradientExchange(ctx, [((NUMBERS + job.elements,), np.float32)])
    gradient, element = np.split(exchange.gradient(0), [NUMBERS])
    weights = np.full(NUMBERS, 10.0, np.float32)
    for _ in job.iterations(0, ITERATIONS):
        gradient[:] = weights - ctx.rank  # of the loss (weights - rank)**2 / 2
        job.give(element)
        exchange.ready(0)
        time.sleep(0.01)  # work of a real network
        exchange.wait(0)
        job.take(element)
        weights -= 0.01 * gradient
        job.metrics({"loss": float(np.square(weights - ctx.rank).mean() / 2)})
    if ctx.rank == 0:
        print(f"ended in iteration {job.iteration} of {ITERATIONS}, stopped: {job.stopped}")
