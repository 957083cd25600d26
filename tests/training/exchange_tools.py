"""The right result of an exchange, computed with NumPy, and a loop that checks it bit for bit."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from pgasdl import Block, Context, GradientExchange, loopback
from pgasdl.plans.algorithms.shapes import Binomial

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}
SHAPES: tuple[tuple[int, ...], ...] = ((7,), (3, 5), (1,), (33, 3), (0,), (1000,), (64,))
# Plans whose order of additions is computed here; tests/contract runs all the others.
REFERENCED = ("gdraa", "gdraa-direct", "staged", "tree")
RATE = 0.25  # of the update: a power of two, exact in every dtype


@dataclass(frozen=True)
class Case:
    """One exchange: its parameters, and its layers."""

    plan: str
    kind: str
    dtypes: tuple[str, ...] = ("float32",)  # of the layers, in turn
    wire: str | None = None
    bucket_bytes: int = 0
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    options: dict[str, int] = field(default_factory=dict, hash=False)

    def layers(self) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of every layer."""
        return [
            (shape, DTYPES[self.dtypes[number % len(self.dtypes)]])
            for number, shape in enumerate(self.shapes)
        ]

    def make(self, ctx: Context, **more: Any) -> GradientExchange:
        """Make the exchange, with initial weights."""
        update = sgd if self.kind == "update" else None
        exchange = GradientExchange(
            ctx, self.layers(), kind=self.kind, plan=self.plan, update=update, wire=self.wire,
            bucket_bytes=self.bucket_bytes, **self.options, **more,
        )  # fmt: skip
        if self.kind == "update":
            for number in range(len(self.shapes)):
                exchange.weight(number)[...] = initial(self, number)
        return exchange


def sgd(block: Block) -> None:
    """The owner's update: every operation rounds by itself, however the blocks are cut."""
    block.weights -= block.gradient * block.gradient.dtype.type(RATE)


def contribution(case: Case, rank: int, iteration: int, layer: int) -> np.ndarray:
    """A rank's gradient: of several magnitudes, so that the order of additions changes the bits."""
    return _random(*case.layers()[layer], rank, iteration, layer)


@lru_cache(maxsize=1000)
def _random(
    shape: tuple[int, ...], dtype: np.dtype[Any], rank: int, iteration: int, layer: int
) -> np.ndarray:
    generator = np.random.default_rng((rank, iteration, layer))
    magnitude = generator.integers(-6, 6, shape)
    if dtype.kind == "i":
        return generator.integers(-(2**30), 2**30, shape).astype(dtype)
    return np.ldexp(generator.standard_normal(shape, np.float32), magnitude).astype(dtype)


def initial(case: Case, layer: int) -> np.ndarray:
    """A layer's weights before the first iteration."""
    return contribution(case, 1000, 0, layer)


def reduced(case: Case, terms: Sequence[np.ndarray]) -> np.ndarray:
    """The plan's result from all ranks' gradients of one layer."""
    size, dtype = len(terms), terms[0].dtype
    if size == 1:
        return terms[0]
    travels = dtype if case.wire is None else DTYPES[case.wire]
    wide = travels if travels.itemsize == 8 or travels.kind == "i" else np.dtype(np.float32)
    scale = 1.0 if case.kind == "sum" else 1.0 / size

    def total(arrays: Sequence[np.ndarray]) -> np.ndarray:
        result = arrays[0].astype(wide)
        for array in arrays[1:]:
            result = result + array.astype(wide)
        return result

    def of_subtree(node: int) -> np.ndarray:
        root = case.options.get("root", 0)
        own = terms[(node + root) % size].astype(travels)
        below = [of_subtree(child) for _, child in Binomial(size).children(node)]
        everything = total([own, *below])
        return everything if node == 0 else everything.astype(travels)

    if case.plan == "tree":
        result = of_subtree(0)
    else:
        result = total([term.astype(travels) for term in terms])
    if scale != 1.0:
        result = result * wide.type(scale)
    # In kind "update" the reduced gradient stays at its owner and is not sent on.
    return result.astype(dtype if case.kind == "update" else travels).astype(dtype)


def expected(case: Case, size: int, n_iterations: int) -> list[list[np.ndarray]]:
    """By iteration and layer: the mean gradient, or in kind "update" the weights."""
    weights = [initial(case, layer) for layer in range(len(case.shapes))]
    everything = []
    for iteration in range(n_iterations):
        results = []
        for layer in range(len(case.shapes)):
            terms = [contribution(case, rank, iteration, layer) for rank in range(size)]
            result = reduced(case, terms)
            if case.kind == "update":
                weights[layer] = weights[layer] - result * result.dtype.type(RATE)
                result = weights[layer]
            results.append(result)
        everything.append(results)
    return everything


def same_bits(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Compare bytes: 0.0 is not -0.0, and a NaN equals itself."""
    return (
        found.dtype == wanted.dtype
        and found.shape == wanted.shape
        and found.tobytes() == wanted.tobytes()
    )


def train(
    ctx: Context,
    case: Case,
    wanted: list[list[np.ndarray]],
    *,
    skew: float = 0.0,
    exchange: GradientExchange | None = None,
) -> None:
    """Run iterations; layers become ready and are waited for in this rank's own random order.

    ``skew``: seconds that a rank may lag at any layer. There is no barrier anywhere.
    """
    dice = random.Random(f"{ctx.rank} {case.plan} {case.kind}")
    own = case.make(ctx) if exchange is None else exchange
    layers = range(len(case.shapes))
    for iteration, results in enumerate(wanted):
        for layer in dice.sample(layers, len(layers)):
            own.gradient(layer)[...] = contribution(case, ctx.rank, iteration, layer)
            pause(dice, skew)
            own.ready(layer)
        for layer in dice.sample(layers, len(layers)):
            own.wait(layer)
            pause(dice, skew)
            found = own.weight(layer) if case.kind == "update" else own.gradient(layer)
            assert same_bits(found, results[layer]), (
                f"{case}, rank {ctx.rank}, iteration {iteration}, layer {layer}: "
                f"{found.reshape(-1)[:4]} instead of {results[layer].reshape(-1)[:4]}"
            )
    if exchange is None:
        own.close()


def trained(
    size: int, cases: Iterable[Case], n_iterations: int, *, skew: float = 0.0, **options: Any
) -> None:
    """Train each case on ranks that are threads, as `train` does; ``options``: of the ranks."""
    wanted = {case: expected(case, size, n_iterations) for case in cases}

    def program(ctx: Context) -> None:
        for case, results in wanted.items():
            train(ctx, case, results, skew=skew)

    loopback.run(size, program, **options)


def pause(dice: random.Random, skew: float) -> None:
    """Lag now and then."""
    if skew and dice.random() < 0.3:
        time.sleep(dice.random() * skew)


def cases(plan: str) -> Iterator[Case]:
    """Every kind and dtype a plan offers, layers alone and in buckets, and wire precision."""
    for kind in ("average", "update", "sum"):
        if plan == "staged" and kind == "update":
            continue
        for number, dtype in enumerate(("float32", "float64", "float16", "bfloat16")):
            yield Case(plan, kind, (dtype,), bucket_bytes=300 * (number % 2))
        yield Case(plan, kind, ("float32", "bfloat16", "float32", "float64"), bucket_bytes=1000)
        if plan in ("gdraa", "tree"):
            yield Case(plan, kind, ("float32",), wire="bfloat16")
            yield Case(plan, kind, ("float64", "float32"), wire="float16", bucket_bytes=1000)
    yield Case(plan, "sum", ("int32", "int64"), bucket_bytes=100)
