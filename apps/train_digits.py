"""Train a convolutional network on handwritten digits, exchanging gradients layer by layer.

    pgasdl run -n 2 apps/train_digits.py
    pgasdl run -n 2 apps/train_digits.py --kind update --plan tree

Each rank computes its share of every batch. A layer's exchange starts when its gradient is there,
while the layers before it still compute theirs, and is waited for just before the next iteration
uses the layer. There is no barrier. N ranks get the weights of one process, to rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from digits_net import Digits, Network, share
from digits_report import Trace, draw, table
from torch import Tensor, nn

import pgasdl
from pgasdl.plans import PLANS
from pgasdl.training.exchange import Block, GradientExchange


class Layer:
    """A module's weight and bias, side by side in flat memory that the exchange knows."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.parameters = list(module.parameters())
        self.count = sum(p.numel() for p in self.parameters)
        self.missing = 0  # gradients of this iteration that are not there yet
        self.exchanged = False  # given to the exchange, and not waited for since

    def place(self, weights: Tensor, gradient: Tensor) -> None:
        """Move the parameters and their gradients: from now on they are views."""
        self.weights, self.gradient = weights, gradient
        offset = 0
        for parameter in self.parameters:
            part = slice(offset, offset + parameter.numel())
            weights[part] = parameter.data.flatten()
            parameter.data = weights[part].view(parameter.shape)
            parameter.grad = gradient[part].view(parameter.shape)
            offset = part.stop


class MomentumSGD:
    """SGD with momentum, for any piece of the model at a time.

    Every operation is rounded by itself, so how the model is cut into pieces changes no bit: an
    owner that updates its block gets what every rank would get by updating the whole layer.
    """

    def __init__(self, rate: float, momentum: float, n_steps: int) -> None:
        self.rate, self.momentum, self.n_steps = rate, momentum, n_steps
        self._state: dict[Any, tuple[Tensor, int]] = {}

    def step(self, key: Any, weights: Tensor, gradient: Tensor) -> None:
        """Update ``weights`` in place; ``key`` names the piece. The rate falls linearly to 0."""
        velocity, n_done = self._state.get(key) or (torch.zeros_like(weights), 0)
        velocity.mul_(self.momentum).add_(gradient)
        weights.sub_(velocity * (self.rate * (1 - n_done / self.n_steps)))
        self._state[key] = velocity, n_done + 1

    def update(self, block: Block) -> None:
        """The owner's part in kind "update"."""
        weights, gradient = torch.from_numpy(block.weights), torch.from_numpy(block.gradient)
        self.step((block.bucket, block.offset), weights, gradient)


class Trainer:
    """Binds a network to a gradient exchange, by hooks that run before and behind each layer."""

    def __init__(
        self, ctx: pgasdl.Context, network: nn.Module, sgd: MomentumSGD, given: argparse.Namespace
    ) -> None:
        self.sgd = sgd
        self.layers = [Layer(name, module) for name, module in network.named_children()]
        dtype = next(network.parameters()).dtype
        self.exchange = GradientExchange(
            ctx,
            [(layer.count, dtype) for layer in self.layers],
            kind=given.kind,
            plan=given.plan,
            update=sgd.update if given.kind == "update" else None,
            bucket_bytes=given.bucket_bytes,
            wire=given.wire,
        )
        self.trace = Trace([layer.name for layer in self.layers])
        self.owners_update = given.kind == "update"
        for number, layer in enumerate(self.layers):
            gradient = torch.from_numpy(self.exchange.gradient(number))
            if self.owners_update:
                weights = torch.from_numpy(self.exchange.weight(number))
            else:
                weights = torch.empty_like(gradient)
            layer.place(weights, gradient)
            layer.module.register_forward_pre_hook(partial(self.before_forward, number))
            for parameter in layer.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self.have_gradient, number))

    def backward(self, loss: Tensor) -> None:
        """Compute gradients, last layer first, and start each layer's exchange on the way."""
        for layer in self.layers:
            layer.missing = len(layer.parameters)
        self.trace.begin_backward()
        loss.backward()

    def have_gradient(self, number: int, _: Tensor) -> None:
        """Autograd has a parameter's gradient; with the layer's last one the exchange starts."""
        layer = self.layers[number]
        layer.missing -= 1
        if layer.missing == 0:
            self.trace.ready(number)
            self.exchange.ready(number)
            self.trace.turned(number)
            layer.exchanged = True

    def before_forward(self, number: int, *_: Any) -> None:
        """The layer is about to be used: its weights must be those of the last iteration."""
        self.take(number)
        self.trace.begin_forward(number)

    def take(self, number: int) -> None:
        """Wait for the layer's exchange, if there is one, and make its optimizer step."""
        layer = self.layers[number]
        if not layer.exchanged:
            return
        self.trace.begin_wait(number)
        self.exchange.wait(number)
        self.trace.end_wait(number, self.exchange.timing(number))
        if not self.owners_update:
            self.sgd.step(number, layer.weights, layer.gradient)
        layer.gradient.zero_()  # autograd adds to it
        layer.exchanged = False
        self.trace.taken(number)

    def finish(self) -> None:
        """Take every layer: the model is complete. Others may still be behind."""
        for number in range(len(self.layers)):
            self.take(number)

    def digest(self) -> str:
        """Return a fingerprint of the model's bits."""
        sha = hashlib.sha256()
        for layer in self.layers:
            sha.update(layer.weights.numpy().tobytes())
        return sha.hexdigest()


class Course:
    """What happened: loss and accuracy, by iteration and epoch."""

    def __init__(self, n_iterations: int) -> None:
        self.loss = np.zeros(n_iterations)  # of this rank's share; the mean over ranks is global
        self.correct = np.zeros(n_iterations)
        self.tested: list[tuple[int, float]] = []  # (iterations done, accuracy)


class ProgressBar:
    """One line for each epoch, by rank 0; a terminal sees it grow, ``pgasdl run``'s too."""

    def __init__(self, ctx: pgasdl.Context, n_epochs: int, per_epoch: int) -> None:
        self.n_epochs, self.per_epoch = n_epochs, per_epoch
        self.shown = ctx.rank == 0
        self.grows = sys.stdout.isatty() or ctx.launch.kind == "pgasdl"
        self.drawn = 0.0

    def draw(self, n_done: int, text: str, end: str = "") -> None:
        """Redraw the line of the epoch in which the ``n_done``-th iteration was."""
        now = time.monotonic()
        # Writing takes longer than an exchange: ten times a second, and at the end.
        if not self.shown or not (end or (self.grows and now - self.drawn > 0.1)):
            return
        self.drawn = now
        epoch, place = divmod(n_done - 1, self.per_epoch)
        bar = ("#" * (24 * (place + 1) // self.per_epoch)).ljust(24, ".")
        width = len(str(self.n_epochs))
        start = "\r" if self.grows else ""
        print(
            f"{start}epoch {epoch + 1:{width}d}/{self.n_epochs} [{bar}] {text}", end=end, flush=True
        )


def train(ctx: pgasdl.Context, given: argparse.Namespace) -> tuple[Trainer, Course]:
    """Train, and test after every epoch on rank 0."""
    digits = Digits(torch.get_default_dtype())
    network = Network(given.seed)
    per_epoch = len(digits.train) // given.batch
    n_iterations = per_epoch * given.epochs
    sgd = MomentumSGD(given.rate, given.momentum, n_iterations)
    trainer = Trainer(ctx, network, sgd, given)
    course = Course(n_iterations)
    if ctx.rank == 0:
        n_weights = sum(layer.count for layer in trainer.layers)
        print(
            f"{n_ranks(ctx)}, batches of {given.batch}, {n_weights:,} weights; "
            f"{trainer.exchange.describe()}"
        )
    progress = ProgressBar(ctx, given.epochs, per_epoch)
    iteration = 0
    for epoch in range(given.epochs):
        for rows in digits.batches(epoch, given.seed, given.batch):
            mine = share(rows, ctx.rank, ctx.size)
            scores = network(digits.train[mine])
            labels = digits.train_labels[mine]
            # Divided by the global batch: the mean over ranks is the mean over the batch.
            loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
            loss = loss * (ctx.size / given.batch)
            trainer.backward(loss)
            course.loss[iteration] = loss.item()
            course.correct[iteration] = (scores.argmax(1) == labels).sum().item()
            iteration += 1
            progress.draw(iteration, f"loss {loss.item():.4f}")
        trainer.finish()
        if ctx.rank == 0:
            course.tested.append((iteration, accuracy(network, digits)))
            text = f"loss {loss.item():.4f}, test {course.tested[-1][1]:.2%}"
            progress.draw(iteration, text, end="\n")
    return trainer, course


def n_ranks(ctx: pgasdl.Context) -> str:
    """Say how many ranks there are."""
    return "1 rank" if ctx.size == 1 else f"{ctx.size} ranks"


def accuracy(network: nn.Module, digits: Digits) -> float:
    """Return the share of the test images that the network reads rightly."""
    with torch.no_grad():
        return (network(digits.test).argmax(1) == digits.test_labels).double().mean().item()


def report(
    ctx: pgasdl.Context, given: argparse.Namespace, trainer: Trainer, course: Course
) -> None:
    """Gather what the ranks know; rank 0 prints it and draws the picture."""
    ctx.allreduce(course.loss, "mean")
    ctx.allreduce(course.correct, "sum")
    waited = np.zeros(ctx.size)
    waited[ctx.rank] = trainer.trace.waiting / trainer.trace.total
    waited = ctx.world.allreduce(waited)
    digest = trainer.digest()
    same = ""
    if given.check_bits:
        digests = ctx.world.allgather("weights", digest.encode())
        different = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if different:
            raise SystemExit(f"ranks {different} have other weights than rank 0")
        same = f", the same bits on {n_ranks(ctx)}"
    if ctx.rank != 0:
        return
    print()
    print(table(trainer.trace, [layer.count for layer in trainer.layers]))
    print("time spent waiting: " + ", ".join(f"rank {r} {w:.1%}" for r, w in enumerate(waited)))
    print(f"weights: sha256 {digest[:16]}{same}")
    if given.save:
        names = [layer.name for layer in trainer.layers]
        weights = [layer.weights.numpy() for layer in trainer.layers]
        np.savez(given.save, **dict(zip(names, weights, strict=True)))
    if given.picture:
        draw(
            given.picture,
            trainer.trace,
            course.loss,
            course.correct / given.batch,
            course.tested,
            f"{n_ranks(ctx)}, {given.kind}, {trainer.exchange.plan}",
        )
        print(f"picture: {given.picture}")
    print(f"accuracy on the test images: {course.tested[-1][1]:.2%}")


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a network on handwritten digits.")
    add = parser.add_argument
    add("--epochs", type=int, default=10)
    add("--batch", type=int, default=64, help="images of one batch, of all ranks together")
    add("--rate", type=float, default=0.02, help="learning rate at the start; falls to 0")
    add("--momentum", type=float, default=0.9)
    add("--seed", type=int, default=1)
    add("--dtype", choices=("float32", "float64"), default="float32")
    add(
        "--kind",
        choices=("average", "update"),
        default="average",
        help="average the gradients, or let owners update the weights",
    )
    add("--plan", choices=sorted(PLANS), help="how; without it, the best for this transport")
    add("--bucket-bytes", type=int, default=0, help="exchange layers together, up to this size")
    add("--wire", choices=("bfloat16", "float16"), help="send gradients in this precision")
    add(
        "--progress",
        choices=("turn", "thread"),
        default="turn",
        help="exchanges advance at each layer, or by a thread of their own",
    )
    add("--threads", type=int, default=1, help="threads of each rank; changes the bits")
    add("--picture", default="train_digits.png", metavar="FILE", help="empty for none")
    add("--save", metavar="FILE", help="the weights, as .npz")
    add("--check-bits", action="store_true", help="compare the weights of all ranks")
    return parser.parse_args(arguments)


def prepare(given: argparse.Namespace) -> None:
    """Make PyTorch compute the same bits in every run."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(given.threads)
    torch.set_default_dtype(getattr(torch, given.dtype))


def main() -> None:
    """Join the job and train."""
    given = options()
    prepare(given)
    with pgasdl.init(progress=given.progress) as ctx:
        if not ctx.size <= given.batch <= 1437:
            raise SystemExit(f"--batch {given.batch}: from {ctx.size} (one image a rank) to 1437")
        if given.epochs < 1:
            raise SystemExit(f"--epochs {given.epochs}: at least 1")
        trainer, course = train(ctx, given)
        report(ctx, given, trainer, course)


if __name__ == "__main__":
    main()
