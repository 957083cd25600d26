"""Local SGD: ranks train alone for some iterations, then average their weights. A second protocol.

    pgasdl run -n 2 apps/local_sgd.py
    pgasdl job submit -n 2 apps/local_sgd.py --rounds 10000     # by a server; then, while it runs:
    pgasdl job send 1 protocol local                            # or synchronous
    pgasdl job send 1 period 8

A round is an averaging. In protocol "synchronous" it is of the gradients of one iteration; in
"local" it is of the weights, after as many iterations as the period says. Users' commands travel in
the averagings, and all ranks obey two averagings later.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from digits_net import Digits, Network
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import pgasdl
import pgasdl.jobs
from pgasdl.input import Batches

PROTOCOLS = ("synchronous", "local")


class Protocol:
    """How this rank trains: the choice, and the iterations between two averagings."""

    def __init__(self, name: str, period: int) -> None:
        self.name, self.period = name, period

    def choose(self, name: object) -> None:
        """Take another protocol; one that there is not is left."""
        if name in PROTOCOLS:
            self.name = str(name)

    def set_period(self, period: object) -> None:
        """Take another number of iterations, from 1."""
        if isinstance(period, int) and period >= 1:
            self.period = period

    @property
    def iterations(self) -> int:
        """Iterations of a round."""
        return self.period if self.name == "local" else 1


def train(ctx: pgasdl.Context, given: argparse.Namespace) -> None:
    """Train in rounds, and say what all ranks have at the end."""
    digits, network = Digits(torch.float32, "cpu"), Network(given.seed)
    optimizer = torch.optim.SGD(network.parameters(), given.rate)
    protocol = Protocol(given.protocol, given.period)
    place = {"rank": ctx.rank, "size": ctx.size}
    batches = Batches(len(digits.train), given.batch, seed=given.seed, **place)
    rows_of = iter(batches.iterations(0, 1 << 40))

    def backward() -> torch.Tensor:
        rows = next(rows_of)
        optimizer.zero_grad()
        scores = network(digits.train[rows])
        loss = nn.functional.cross_entropy(scores, digits.train_labels[rows])
        loss.backward()
        return loss.detach()

    with pgasdl.jobs.connect(ctx) as job:

        @job.on("protocol")
        def _(name: object) -> None:
            protocol.choose(name)
            print(f"rank {ctx.rank}, round {job.iteration}: {protocol.name}", flush=True)

        @job.on("period")
        def _(period: object) -> None:
            protocol.set_period(period)
            print(f"rank {ctx.rank}, round {job.iteration}: {protocol.period}", flush=True)

        count = sum(each.numel() for each in network.parameters())
        # Weights or gradients, and the element that tells all ranks of commands.
        averaged = ctx.segment(4 * (count + job.elements), notifications=0).numpy(np.float32)
        numbers, element = torch.from_numpy(averaged[:count]), averaged[count:]
        for number in job.iterations(0, given.rounds):
            for _ in range(protocol.iterations):
                loss = backward()
                if protocol.name == "local":
                    optimizer.step()
            numbers.copy_(_values(network, gradients=protocol.name == "synchronous"))
            job.give(element)
            ctx.allreduce(averaged, "mean")
            job.take(element)
            if protocol.name == "local":
                vector_to_parameters(numbers.clone(), network.parameters())
            else:
                _set_gradients(network, numbers)
                optimizer.step()
            job.metrics({"loss": loss.item(), "iterations": protocol.iterations})
            if ctx.rank == 0 and number % 50 == 0:
                print(f"round {number}: loss {loss.item():.4f}", flush=True)
        weights = parameters_to_vector(network.parameters()).detach().numpy()
        digest = hashlib.sha256(weights.tobytes()).hexdigest()
        with torch.no_grad():
            right = (network(digits.test).argmax(1) == digits.test_labels).double().mean().item()
        print(f"rank {ctx.rank}: accuracy {right:.2%}, weights: sha256 {digest[:16]}", flush=True)


def _values(network: nn.Module, *, gradients: bool) -> torch.Tensor:
    with torch.no_grad():
        each = (p.grad if gradients else p for p in network.parameters())
        return torch.cat([value.flatten() for value in each])


def _set_gradients(network: nn.Module, numbers: torch.Tensor) -> None:
    sizes = [each.numel() for each in network.parameters()]
    for each, part in zip(network.parameters(), numbers.split(sizes), strict=True):
        each.grad.copy_(part.view_as(each))


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train by averaging weights, or gradients.")
    add = parser.add_argument
    add("--rounds", type=int, default=200, help="averagings")
    add("--protocol", choices=PROTOCOLS, default="local", help="at the start")
    add("--period", type=int, default=4, help="iterations between two averagings of weights")
    add("--batch", type=int, default=64, help="images of one batch, of all ranks together")
    add("--rate", type=float, default=0.05, help="learning rate")
    add("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main() -> None:
    """Join the job and train."""
    given = options()
    torch.set_num_threads(1)
    with pgasdl.init() as ctx:
        train(ctx, given)


if __name__ == "__main__":
    main()
