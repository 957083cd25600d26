"""Exchanges three layers, rank 1 late, and tells a loss and an accuracy.

``watched.py RATE LAST``: the loss falls by so much in each iteration.
"""

import sys

import numpy as np

import pgasdl
import pgasdl.jobs

rate, last = float(sys.argv[1]), int(sys.argv[2])
work = np.ones((300, 300))
print("<b>so it begins</b>", flush=True)
with pgasdl.init() as ctx, pgasdl.jobs.connect(ctx) as job:
    shapes = [((256,), np.float32), ((512,), np.float32), ((64 + job.elements,), np.float32)]
    with pgasdl.GradientExchange(ctx, shapes) as exchange:
        element = exchange.gradient(2)[64:]
        for iteration in job.iterations(0, last):
            for layer in range(3):
                exchange.wait(layer)
            job.take(element)
            for _ in range(5 * ctx.rank):
                work @ work
            for layer in (2, 1, 0):
                exchange.gradient(layer)[:64] = 1
                if layer == 2:
                    job.give(element)
                exchange.ready(layer)
            loss = (1 - rate) ** iteration
            job.metrics({"loss": loss, "accuracy": 1 - loss, "rate": rate})
            if rate == 0.03:
                job.metrics({"constructor": rate})  # which every object of JavaScript has
