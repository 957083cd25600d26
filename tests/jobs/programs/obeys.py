"""Trains a small model, obeys, and says on every rank what it did when.

``obeys.py KIND LAST [paused]``: kind of the exchange; iterations. PyTorch is loaded for kinds
"average" and "update" alone.
"""

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import pgasdl
import pgasdl.jobs

kind, last, *words = sys.argv[1:]
optimizer = None
if kind != "exchange":
    import torch

    from pgasdl.torch import attach

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

with pgasdl.init() as ctx, pgasdl.jobs.connect(ctx, paused="paused" in words) as job:

    def say(*words: object) -> None:
        print(f"rank {ctx.rank} at {job.iteration}:", *words, flush=True)

    def iterations() -> Iterator[int]:
        for iteration in job.iterations(0, int(last)):
            yield iteration
            time.sleep(0.001)  # other tests need the cores, too

    @job.on("learning-rate")
    def _(value: float) -> None:
        if optimizer is not None:
            optimizer.param_groups[0]["lr"] = value
        say("learning-rate", value)

    @job.on("own")
    def _(value: object) -> None:
        say("own", value)

    @job.on("picky")
    def _(value: Any) -> None:
        if value == "on rank 1":
            assert ctx.rank != 1, "not here"
        else:
            say("picky", float(value))

    @job.on("checkpoint")
    def _(value: object) -> None:
        say("checkpoint", value)

    print("process", os.getpid(), flush=True)
    if optimizer is None:
        exchange = pgasdl.GradientExchange(ctx, [((5 + job.elements,), np.float32)])
        gradient, element = np.split(exchange.gradient(0), [5])
        with exchange:
            for iteration in iterations():
                exchange.wait(0)
                job.take(element)
                gradient[:] = iteration
                job.give(element)
                exchange.ready(0)
                job.metrics({"iteration": iteration})
    else:
        options = {"bucket_bytes": 1 << 20} if kind == "average" else {}
        with attach(model, optimizer, context=ctx, kind=kind, job=job, **options):
            for iteration in iterations():
                loss = model(torch.full((3, 4), 1.0 + ctx.rank)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                job.metrics({"loss": loss.item()})
                if iteration == 3:
                    job.event("third", "is over")
    say("ends", "stopped" if job.stopped else "by itself", job.elements)
