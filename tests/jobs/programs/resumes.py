"""Trains with checkpoints; rank 1 dies once between backward and step; then trains undisturbed.

Both trainings end with the digest of all that the next iteration would depend on.
"""

import hashlib
import os
import signal
from pathlib import Path

import torch

import pgasdl
from pgasdl.checkpoint import Checkpoints
from pgasdl.torch import attach

LAST, EVERY, DIES_AT = 12, 4, 6


def train(ctx: pgasdl.Context, checkpoints: Checkpoints | None) -> tuple[int, str]:
    """The iteration that it began with, and the digest."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    found = None if checkpoints is None else checkpoints.load_last()
    first = 0
    if found is not None:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["iteration"]
    with attach(model, optimizer, context=ctx):
        for iteration in range(first, LAST):
            rows = torch.Generator().manual_seed(100 * iteration + ctx.rank)
            model(torch.randn(5, 9, generator=rows)).square().mean().backward()
            if checkpoints is not None and first == 0 and (ctx.rank, iteration) == (1, DIES_AT):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            if checkpoints is not None and (iteration + 1) % EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                if ctx.rank == 0:
                    checkpoints.save(iteration + 1, state | {"iteration": iteration + 1})
    sha = hashlib.sha256()
    for each in [*model.parameters(), *_moments(optimizer)]:
        sha.update(each.detach().numpy().tobytes())
    return first, sha.hexdigest()


def _moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = optimizer.state_dict()["state"]
    return [states[index][name] for index in sorted(states) for name in sorted(states[index])]


with pgasdl.init() as ctx:
    folder = Path(os.environ["PGASDL_JOB_FOLDER"], "checkpoints")
    for what, checkpoints in (("resumed", Checkpoints(folder)), ("undisturbed", None)):
        first, digest = train(ctx, checkpoints)
        print(f"{what}: began with {first}, ended with {digest}", flush=True)
