"""Train a convolutional network on handwritten digits, exchanging gradients layer by layer.

    pgasdl run -n 2 apps/train_digits.py
    pgasdl run -n 2 apps/train_digits.py --kind update --plan tree

Each rank computes its share of every batch; ``pgasdl.torch.attach`` does the rest. A layer's
exchange starts when its gradient is there, while the layers before it still compute theirs, and is
waited for just before the next iteration uses the layer. There is no barrier. N ranks get the
weights of one process, to rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from digits_net import Digits, Network
from digits_report import Trace, draw, table
from torch import nn

import pgasdl
from pgasdl.input import Batches
from pgasdl.plans import PLANS
from pgasdl.torch import attach


class Course:
    """The course of a training: loss and accuracy, by iteration and epoch."""

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


@dataclass
class Training:
    """A trained network, and the record of its training."""

    network: Network
    course: Course
    trace: Trace
    plan: str


def train(ctx: pgasdl.Context, given: argparse.Namespace) -> Training:
    """Train, and test after every epoch."""
    digits = Digits(torch.get_default_dtype(), given.device)
    network = Network(given.seed).to(given.device)
    place = {"rank": ctx.rank, "size": ctx.size}
    batches = Batches(len(digits.train), given.batch, seed=given.seed, **place)
    per_epoch = batches.per_epoch
    n_iterations = per_epoch * given.epochs
    optimizer = torch.optim.SGD(network.parameters(), given.rate, momentum=given.momentum)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n_done: 1 - n_done / n_iterations)
    course = Course(n_iterations)
    progress = ProgressBar(ctx, given.epochs, per_epoch)
    trace = Trace(network)
    options = {"plan": given.plan, "bucket_bytes": given.bucket_bytes, "wire": given.wire}
    with attach(network, optimizer, context=ctx, kind=given.kind, **options) as attached:
        trace.follow(attached.exchange)
        if ctx.rank == 0:
            n_weights = sum(each.numel() for each in network.parameters())
            print(
                f"{n_ranks(ctx)}, batches of {given.batch}, {n_weights:,} weights; "
                f"{attached.describe()}"
            )
        for iteration, rows in enumerate(batches.iterations(0, n_iterations)):
            scores = network(digits.train[rows])
            labels = digits.train_labels[rows]
            # Divided by the global batch: the mean over ranks is the mean over the batch.
            loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
            loss = loss * (ctx.size / given.batch)
            trace.begin_backward()
            loss.backward()  # a layer's exchange starts when its gradient is there
            optimizer.step()
            optimizer.zero_grad()
            falling.step()
            course.loss[iteration] = loss.item()
            course.correct[iteration] = (scores.argmax(1) == labels).sum().item()
            text, end = f"loss {loss.item():.4f}", ""
            if (iteration + 1) % per_epoch == 0:
                course.tested.append((iteration + 1, accuracy(network, digits)))
                text, end = f"{text}, test {course.tested[-1][1]:.2%}", "\n"
            progress.draw(iteration + 1, text, end)
        return Training(network, course, trace, attached.exchange.plan)


def n_ranks(ctx: pgasdl.Context) -> str:
    """Say how many ranks there are."""
    return "1 rank" if ctx.size == 1 else f"{ctx.size} ranks"


def accuracy(network: nn.Module, digits: Digits) -> float:
    """Return the share of the test images that the network reads correctly."""
    with torch.no_grad():
        return (network(digits.test).argmax(1) == digits.test_labels).double().mean().item()


def weights(network: nn.Module) -> dict[str, np.ndarray]:
    """Return each layer's weights and biases, flat."""
    return {
        name: torch.cat([each.detach().flatten() for each in layer.parameters()]).cpu().numpy()
        for name, layer in network.named_children()
    }


def digest(network: nn.Module) -> str:
    """Return a fingerprint of the network's bits."""
    return hashlib.sha256(
        b"".join(each.tobytes() for each in weights(network).values())
    ).hexdigest()


def report(ctx: pgasdl.Context, given: argparse.Namespace, training: Training) -> None:
    """Gather what the ranks know; rank 0 prints it and draws the picture."""
    course, trace, network = training.course, training.trace, training.network
    ctx.allreduce(course.loss, "mean")
    ctx.allreduce(course.correct, "sum")
    waited = np.zeros(ctx.size)
    waited[ctx.rank] = trace.waiting / trace.total
    waited = ctx.world.combine(waited)
    bits, same = digest(network), ""
    if given.check_bits:
        digests = ctx.world.allgather("weights", bits.encode())
        different = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if different:
            raise SystemExit(f"ranks {different} have other weights than rank 0")
        same = f", the same bits on {n_ranks(ctx)}"
    if ctx.rank != 0:
        return
    layers = weights(network)
    print()
    print(table(trace, [each.size for each in layers.values()]))
    print("time spent waiting: " + ", ".join(f"rank {r} {w:.1%}" for r, w in enumerate(waited)))
    print(f"weights: sha256 {bits[:16]}{same}")
    if given.save:
        np.savez(given.save, **layers)
    if given.picture:
        title = f"{n_ranks(ctx)}, {given.kind}, {training.plan}"
        right = course.correct / given.batch
        draw(given.picture, trace, course.loss, right, course.tested, title)
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
    add("--device", default="cpu", help="or cuda: all ranks use one GPU")
    add("--threads", type=int, default=1, help="threads of each rank; changes the bits")
    add("--picture", default="train_digits.png", metavar="FILE", help="empty for none")
    add("--save", metavar="FILE", help="the weights, as .npz")
    add("--check-bits", action="store_true", help="compare the weights of all ranks")
    return parser.parse_args(arguments)


def prepare(given: argparse.Namespace) -> None:
    """Make PyTorch compute the same bits in every run."""
    # On a GPU PyTorch warns where it cannot; ranks have the same weights all the same.
    torch.use_deterministic_algorithms(True, warn_only=given.device != "cpu")
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
        report(ctx, given, train(ctx, given))


if __name__ == "__main__":
    main()
