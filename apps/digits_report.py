"""A report of a rank's time: recorded per layer, as a table and as a picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from bench.timeline import Bar, Span, draw_bars, legend, new_figure

if TYPE_CHECKING:
    from torch import nn

    from pgasdl import GradientExchange

Floats = npt.NDArray[np.float64]

_MOMENTS = (
    "forward_from",
    "forward_to",
    "ready",
    "turned",
    "began",
    "ended",
    "wait_from",
    "wait_to",
    "taken",
)


class Iteration:
    """Moments of one iteration, in seconds: per layer, and when the backward pass began."""

    def __init__(self, n_layers: int) -> None:
        self.backward_from = 0.0
        self.at = {moment: [0.0] * n_layers for moment in _MOMENTS}


class Trace:
    """Records moments of this rank's work, by hooks in front of attach's and behind them.

    An iteration's exchanges end in the next one's forward pass, so two are open at a time: one
    whose gradients are on their way, and one that is computed.
    """

    def __init__(self, network: nn.Module) -> None:
        self.layers = [name for name, _ in network.named_children()]
        self.iterations: list[Iteration] = []
        self._next = Iteration(len(self.layers))
        self._forward: int | None = None  # the layer that computes
        self._exchanged: set[int] = set()  # layers that were not used since
        self._modules = list(network.children())
        self._hook_backward(self._ready)

    def follow(self, exchange: GradientExchange) -> None:
        """Also record moments behind attach's hooks; ``exchange`` knows its own times."""
        self._exchange = exchange
        self._hook_backward(self._turned)
        for number, module in enumerate(self._modules):
            module.register_forward_pre_hook(lambda *_, at=number: self._used(at), prepend=True)
            module.register_forward_pre_hook(lambda *_, at=number: self._taken(at))

    def _hook_backward(self, call: Callable[[int], None]) -> None:
        for number, module in enumerate(self._modules):
            for each in module.parameters():
                each.register_post_accumulate_grad_hook(lambda *_, at=number: call(at))

    @property
    def exchanging(self) -> Iteration:
        """The iteration whose gradients are exchanged."""
        return self.iterations[-1]

    def begin_backward(self) -> None:
        """The forward pass is over, loss included."""
        self._next.backward_from = self._end_forward()
        self.iterations.append(self._next)
        self._next = Iteration(len(self.layers))

    def _end_forward(self) -> float:
        now = time.monotonic()
        if self._forward is not None:
            self._next.at["forward_to"][self._forward] = now
            self._forward = None
        return now

    def _ready(self, layer: int) -> None:
        """A gradient of the layer is there; the last one starts the exchange."""
        self.exchanging.at["ready"][layer] = time.monotonic()
        self._exchanged.add(layer)

    def _turned(self, layer: int) -> None:
        """Its exchange has been started, and all exchanges have had a turn."""
        self.exchanging.at["turned"][layer] = time.monotonic()

    def _used(self, layer: int) -> None:
        """The layer is about to be used, and the one before it has computed."""
        now = self._end_forward()
        if layer in self._exchanged:
            self.exchanging.at["wait_from"][layer] = now

    def _taken(self, layer: int) -> None:
        """Its weights are the new ones: it computes."""
        now = time.monotonic()
        if layer in self._exchanged:
            timing, at = self._exchange.timing(layer), self.exchanging.at
            at["began"][layer], at["ended"][layer] = timing.began, timing.ended
            at["wait_to"][layer], at["taken"][layer] = timing.waited, now
            self._exchanged.remove(layer)
        self._next.at["forward_from"][layer] = now
        self._forward = layer

    def moment(self, name: str) -> Floats:
        """Return one kind of moments, by iteration and layer."""
        return np.array([iteration.at[name] for iteration in self.iterations])

    @property
    def backward_from(self) -> Floats:
        """The moment when each iteration's backward pass began."""
        return np.array([iteration.backward_from for iteration in self.iterations])

    def spans(self) -> dict[str, tuple[Floats, Floats]]:
        """Return begin and end of each layer's work, by iteration and layer."""
        turned = self.moment("turned")
        # A layer's backward pass begins when the next layer's exchange has had its turn.
        began = np.column_stack([turned[:, 1:], self.backward_from])
        return {
            "forward": (self.moment("forward_from"), self.moment("forward_to")),
            "backward": (began, self.moment("ready")),
            "turn": (self.moment("ready"), turned),
            "waiting": (self.moment("wait_from"), self.moment("wait_to")),
            "update": (self.moment("wait_to"), self.moment("taken")),
            "exchange": (self.moment("began"), self.moment("ended")),
        }

    @property
    def total(self) -> float:
        """Seconds from the first layer's first pass to the last weight's last update."""
        return float(self.moment("taken").max() - self.moment("forward_from")[0, 0])

    @property
    def waiting(self) -> float:
        """Seconds in which this rank could do nothing but wait for others."""
        return float((self.moment("wait_to") - self.moment("wait_from")).sum())


def table(trace: Trace, counts: Sequence[int]) -> str:
    """Lay out the mean time per iteration, by layer and by what it was spent on."""
    spent = {name: 1e3 * (end - begin).mean(axis=0) for name, (begin, end) in trace.spans().items()}
    width = max(map(len, trace.layers))
    head = "".join(f"{name:>10}" for name in spent)
    lines = [f"{'ms':{width}}  {'weights':>8}{head}"]
    for number, layer in enumerate(trace.layers):
        row = "".join(f"{values[number]:10.3f}" for values in spent.values())
        lines.append(f"{layer:{width}}  {counts[number]:8,}{row}")
    sums = "".join(f"{values.sum():10.3f}" for values in spent.values())
    lines.append(f"{'all':{width}}  {sum(counts):8,}{sums}")
    n = len(trace.iterations)
    whole = 1e3 * trace.total / n
    of_layers = sum(values.sum() for name, values in spent.items() if name != "exchange")
    lines.append(
        f"{n} iterations of {whole:.2f} ms, {whole - of_layers:.2f} of them outside the layers; "
        "exchanges overlap with the rest"
    )
    return "\n".join(lines)


def typical(trace: Trace) -> int:
    """Return the iteration of median length, of those that have a successor, late in the course."""
    length = np.diff(trace.backward_from)
    late = len(length) // 2
    return late + int(np.argsort(length[late:])[(len(length) - late) // 2])


def draw(
    path: str,
    trace: Trace,
    loss: Floats,
    correct: Floats,
    tested: Sequence[tuple[int, float]],
    title: str,
) -> None:
    """Write the picture: loss and accuracy over iterations, and the timeline of one of them.

    Parameters
    ----------
    path : file to write; its ending says the format
    trace : of this rank
    loss, correct : by iteration, of the global batch; ``correct`` is a share
    tested : (iterations done, share of the test images read rightly)
    title : what was run
    """
    figure = new_figure(12, 5)
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 2))
    _draw_course(
        figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0]), loss, correct, tested
    )
    _draw_timeline(figure.add_subplot(grid[:, 1]), trace, title)
    figure.savefig(path, dpi=130)


def _smooth(values: Floats, n: int) -> tuple[Floats, Floats]:
    """Mean over n neighbours, and the iterations these stand for."""
    n = max(1, min(n, len(values)))
    means = np.convolve(values, np.ones(n) / n, mode="valid")
    return np.arange(len(means)) + (n + 1) / 2, means


def _draw_course(
    above: Any, below: Any, loss: Floats, correct: Floats, tested: Sequence[tuple[int, float]]
) -> None:
    iterations = np.arange(1, len(loss) + 1)
    above.plot(iterations, loss, color="#b8c9e1", linewidth=0.8)
    above.plot(*_smooth(loss, 15), color="#2f5d9b")
    above.set_yscale("log")
    above.set_ylabel("training loss")
    above.tick_params(labelbottom=False)
    below.plot(iterations, 100 * correct, color="#b8c9e1", linewidth=0.8)
    below.plot(*_smooth(100 * correct, 15), color="#2f5d9b", label="training")
    at, share = np.array(tested).T
    below.plot(at, 100 * share, "o-", color="#c8552b", markersize=3.5, label="test")
    low = 100 * min(share.min(), np.median(correct))
    below.set_ylim(max(0, min(90, low - 2)), 100.5)
    below.set_ylabel("accuracy, %")
    below.set_xlabel("iteration")
    below.legend(loc="lower right", frameon=False)
    above.set_title("Course of the training", loc="left", fontweight="bold")


def _draw_timeline(axes: Any, trace: Trace, title: str) -> None:
    chosen = typical(trace)
    origin = trace.backward_from[chosen]
    bars = []
    for name, (begins, ends) in trace.spans().items():
        # The forward pass that ends this iteration's waits is the next iteration's.
        which = chosen + 1 if name == "forward" else chosen
        shift, height = (0.05, 0.3) if name == "exchange" else (-0.38, 0.4)
        bars += [
            Bar(Span(name, name, begins[which, at], ends[which, at]), at + shift, height)
            for at in range(len(trace.layers))
        ]
    draw_bars(axes, bars, origin)
    turned = 1e3 * (trace.moment("turned")[chosen].max() - origin)
    axes.axvline(turned, 0, 0.9, color="#888888", linewidth=0.8, linestyle=":")
    axes.annotate(
        "backward pass ends",
        (turned, -0.55),
        xytext=(4, 0),
        color="#666666",
        textcoords="offset points",
        fontsize=8,
    )
    axes.set_yticks(range(len(trace.layers)), trace.layers)
    axes.set_xlim(0)
    axes.set_xlabel("milliseconds since the backward pass began")
    names = {"next forward": "forward", "optimizer step": "update"}
    same = {name: name for name in ("backward", "turn", "exchange", "waiting")}
    legend(axes, same | names, 6, bottom=0.92)
    axes.set_ylim(-0.6, len(trace.layers) - 0.1)
    axes.set_title(f"Iteration {chosen + 1} on rank 0: {title}", loc="left", fontweight="bold")
