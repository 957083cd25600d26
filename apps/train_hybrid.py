"""Spread the wide layers of a network over the ranks, and train the others data-parallel.

    pgasdl run -n 2 apps/train_hybrid.py --picture train_hybrid.png

Expresso's hybrid, on dMath: convolutions have few weights and much to compute, so every rank has
them all and a share of the batch; the linear layers at the end have nearly all the weights, so each
rank keeps a part of them, and inputs and outputs travel instead of gradients. Both trainings start
alike and see the same batches. Their losses differ by rounding.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from bench.pipeline.networks import NETWORKS, data
from bench.timeline import new_figure
from torch import nn

import pgasdl
import pgasdl.matrix as pm
import pgasdl.torch

KINDS = {"data": "data-parallel", "hybrid": "hybrid"}
COLOURS = {"layers": "#9bb7dc", "compute": "#2f5d9b", "move": "#f0a04b", "wait": "#cc2936"}
WORDS = {
    "layers": "computes layers",
    "compute": "multiplies spread layers",
    "move": "moves",
    "wait": "waits",
}


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a network with spread layers.")
    add = parser.add_argument
    images = [name for name, network in NETWORKS.items() if network.reads == "images"]
    add("--network", choices=images, default="alexnet")
    add("--pixels", type=int, help="of an image's side; without it, the network's own")
    add("--batch", type=int, default=8, help="images of a rank")
    add("--iterations", type=int, default=6)
    add("--layout", default="rows", choices=("rows", "columns", "grid"), help="of spread weights")
    add("--picture", default="", metavar="FILE", help="who holds, computes, moves and waits")
    return parser.parse_args()


@dataclass
class Run:
    """The figures of one training on a rank; the last three are of the last iteration."""

    losses: list[float] = field(default_factory=list)  # means over the ranks
    # Bytes of weights, gradients and momentum, by "shared" and "spread" layers.
    held: dict[str, int] = field(default_factory=dict)
    moved: int = 0  # bytes that this rank wrote and read
    seconds: float = 0.0
    spans: list[pm.Span] = field(default_factory=list)


def watch(layer: nn.Module, note: Callable[[float, float], None]) -> None:
    """Note when a layer computes, forward and backward."""
    begun: list[float] = []

    def begin(*_: Any) -> None:
        begun.append(time.monotonic())

    def end(*_: Any) -> None:
        note(begun.pop(), time.monotonic())

    # PyTorch warns that the images, as the first layer's inputs, have no gradient.
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    layer.register_forward_pre_hook(begin)
    layer.register_forward_hook(end)
    layer.register_full_backward_pre_hook(begin)
    layer.register_full_backward_hook(end)


def train(kind: str, ctx: pgasdl.Context, given: argparse.Namespace) -> Run:
    """Train, all ranks together."""
    torch.manual_seed(1)
    model = NETWORKS[given.network].make()
    run = Run()
    spread: list[nn.Module] = []
    for name, layer in list(model.named_children()):
        if kind == "hybrid" and isinstance(layer, nn.Linear):
            spread.append(pgasdl.torch.DistributedLinear(ctx, layer, given.layout))
            setattr(model, name, spread[-1])
        else:
            watch(layer, lambda begin, end: run.spans.append(pm.Span("layers", begin, end)))
    shared = nn.ModuleList(layer for layer in model.children() if layer not in spread)
    optimizers = [
        torch.optim.SGD(layers.parameters(), 0.01, momentum=0.9)
        for layers in (shared, nn.ModuleList(spread))
        if len(layers)
    ]
    pixels = given.pixels or NETWORKS[given.network].size
    images, labels = data(given.network, given.batch, pixels, ctx.rank)
    with pgasdl.torch.attach(shared, optimizers[0], context=ctx) as attached:
        for number in range(1, given.iterations + 1):
            run.spans.clear()
            before, began = ctx.counters(), time.monotonic()
            with pm.trace(ctx) as spans:
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                waiting = time.monotonic()
                attached.wait()
                run.spans += [*spans, pm.Span("wait", waiting, time.monotonic())]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            attached.synchronize()
            run.seconds = time.monotonic() - began
            traffic = (ctx.counters() - before).total
            run.moved = traffic.bytes_written + traffic.bytes_read
            run.losses.append(float(ctx.world.combine(np.array([loss.item()]), "mean")[0]))
            if ctx.rank == 0:
                which = f"{KINDS[kind]}, iteration {number} of {given.iterations}"
                print(f"{which}: loss {run.losses[-1]:.5f}", flush=True)
    for what, layers in (("shared", shared), ("spread", nn.ModuleList(spread))):
        run.held[what] = 3 * sum(each.nbytes for each in layers.parameters())
    return run


def draw(path: str, runs: dict[str, list[Run]]) -> None:
    """Draw who holds, computes, moves and waits: all ranks, for both trainings."""
    size = len(runs["data"])
    figure = new_figure(9, 1.6 + 0.9 * size)
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 3))
    axes = figure.add_subplot(grid[:, 0])
    rows = [(f"{KINDS[kind]}\nrank {r}", run) for kind in runs for r, run in enumerate(runs[kind])]
    for row, (_, run) in enumerate(rows):
        shared, spread = (run.held[what] / 2**20 for what in ("shared", "spread"))
        axes.barh(row, shared, color=COLOURS["layers"])
        axes.barh(row, spread, left=shared, color=COLOURS["compute"])
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("MiB of weights, gradients, momentum")
    axes.set_title("holds", loc="left", fontweight="bold")
    longest = max(run.seconds for each in runs.values() for run in each)
    for place, (kind, each) in enumerate(runs.items()):
        axes = figure.add_subplot(grid[place, 1])
        origin = min(span.begin for run in each for span in run.spans)
        for row, run in enumerate(each):
            for span in run.spans:
                box = 1e3 * (span.begin - origin), 1e3 * (span.end - span.begin)
                axes.broken_barh([box], (row - 0.4, 0.8), facecolor=COLOURS[span.kind])
        axes.set_yticks(range(size), [f"rank {r}" for r in range(size)])
        axes.invert_yaxis()
        axes.set_xlim(0, 1e3 * longest)
        axes.set_title(f"{KINDS[kind]}: an iteration", loc="left", fontweight="bold")
    axes.set_xlabel("ms")
    handles = [_patch(COLOURS[kind], word) for kind, word in WORDS.items()]
    figure.legend(handles=handles, loc="outside lower right", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def gather(ctx: pgasdl.Context, run: Run) -> list[Run]:
    """Return every rank's."""
    blobs = ctx.world.allgather("a run", json.dumps(asdict(run)).encode())
    found = [Run(**json.loads(blob)) for blob in blobs]
    for each in found:
        each.spans = [pm.Span(*span) for span in each.spans]
    return found


def main() -> None:
    """Join the job, train twice, and compare."""
    given = options()
    with pgasdl.init() as ctx:
        ctx.pool(512 << 20)
        runs = {kind: gather(ctx, train(kind, ctx, given)) for kind in KINDS}
    if ctx.rank != 0:
        return
    print(f"{given.network}, {len(runs['data'])} ranks with {given.batch} images each; a rank:")
    for kind, each in runs.items():
        held, moved = (max(sum(run.held.values()) for run in each), max(run.moved for run in each))
        print(
            f"{KINDS[kind]:14} holds {held / 2**20:7.1f} MiB, writes and reads "
            f"{moved / 2**20:7.2f} MiB and takes {each[0].seconds:6.3f} s per iteration, "
            f"loss {each[0].losses[-1]:.5f}"
        )
    worst = np.abs(np.subtract(runs["data"][0].losses, runs["hybrid"][0].losses)).max()
    print(f"the losses differ by at most {worst:.1e}")
    if given.picture:
        draw(given.picture, runs)
        print(f"picture: {given.picture}")


if __name__ == "__main__":
    main()
