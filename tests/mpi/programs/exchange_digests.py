"""Exchanges by every plan that runs here; rank 0 prints the digests of all results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import numpy as np
from exchange_tools import Case, contribution

import pgasdl
from pgasdl.plans import EXCHANGES, PLANS

# The same over every transport, whatever each would choose itself.
OPTIONS = {
    "gdraa-nodes": {"group_size": 2, "direct": 0},
    "chain-chain": {"chain_size": 2},
    "chain-binomial": {"chain_size": 2},
}
SHAPES = ((7,), (33, 3), (0,), (1000,), (64,))
N_ITERATIONS = 3


def cases(mapped: bool) -> Iterator[Case]:
    """All plans and kinds, in buckets of several layers and dtypes, and with a wire dtype."""
    for plan, spec in PLANS.items():
        for kind in EXCHANGES:
            if kind in spec.kinds and (mapped or not spec.mapped):
                rest = {"shapes": SHAPES, "options": OPTIONS.get(plan, {})}
                yield Case(plan, kind, ("float32", "bfloat16", "float32"), **rest)
                if spec.wire:
                    yield Case(plan, kind, wire="float16", bucket_bytes=1000, **rest)


def digest(ctx: pgasdl.Context, case: Case) -> str:
    """The digest of the results of all iterations."""
    everything = hashlib.sha256()
    exchange = case.make(ctx)
    assert exchange.plan == case.plan
    layers = range(len(SHAPES))
    for iteration in range(N_ITERATIONS):
        for layer in reversed(layers):
            exchange.gradient(layer)[...] = contribution(case, ctx.rank, iteration, layer)
            exchange.ready(layer)
        for layer in layers:
            exchange.wait(layer)
            found = exchange.weight(layer) if case.kind == "update" else exchange.gradient(layer)
            everything.update(found.tobytes())
    exchange.close()
    return everything.hexdigest()


def main() -> None:
    """Print one line of JSON: digests by plan, kind and wire."""
    with pgasdl.init(log="warning", timeout=60) as ctx:
        found = {f"{c.plan} {c.kind} {c.wire}": digest(ctx, c) for c in cases(ctx.mapped)}
        words = np.array([int(text[:8], 16) for text in found.values()])
        total = words.copy()
        ctx.allreduce(total, "sum")
        assert (total == ctx.size * words).all(), "other bits on another rank"
        if ctx.rank == 0:
            print(json.dumps([ctx.transport_of(1), found]), flush=True)


if __name__ == "__main__":
    main()
