"""Reduce and broadcast where nobody names a plan: which tree, and in how many chunks.

Paper
    S-Caffe sections 5 and 6.5, HR (Tuned): for each size and number of processes the fastest of a
    binomial tree, chains of chains and chains under a binomial tree, with chains of the best
    length. The paper measures; here the cost below decides, and `pgasdl tune` and a policy measure.

Cost of S bytes in n chunks, with t = S / n by the bandwidth, and the depth D and the width W of the
tree: hops from the last rank to the root, and children of the node that has most
    broadcast   D (latency + startup + t) + (n - 1) W (startup + t)
    reduce      D (latency + startup + 2 t) + (n - 1) max(startup + t, W t)
    since a rank adds a chunk, as fast as chunks travel, while the next one travels, and since a
    message occupies its sender for ``startup``, but not its receiver.

By nodes
    Ranks of a node are a chain or a tree of their own, so that S goes across N - 1 times, whatever
    the root is. Where nodes are not known, supernodes serve; without them chains of any power of
    two are weighed.

Simulated on the machine of ``gdraa_nodes``, with 256 ranks by 8: the choice is within 2 % of the
fastest of these trees in 1, 8, 32 or 128 chunks. Microseconds, and of a binomial tree in one chunk
    reduce      16 KiB: 27, 82      64 KiB: 56, 293      1 MiB: 407, 4520
    broadcast   16 KiB: 24, 24      64 KiB: 59, 59       1 MiB: 321, 747
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pgasdl.plans.plan import EXCHANGES, ROOTED, Case, Sizes, lengths

# Estimates for RDMA adapters: nanoseconds that a message takes, inside a node and across, and that
# it occupies its sender; bytes per nanosecond. `pgasdl tune` measures them.
LATENCY_INSIDE, LATENCY, STARTUP, BANDWIDTH = 600, 1500, 300, 10
# Nanoseconds until a sleeping rank wakes up.
LATENCY_CROWDED = 10_000
CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True, slots=True)
class Tree:
    """A plan with chains or trees of ``group`` ranks; 0: it has one level."""

    plan: str
    group: Sizes
    inside: int  # hops in a group, the largest
    across: int  # hops between heads
    width: int


def trees(size: int, group: Sizes) -> Iterator[Tree]:
    """Yield the trees of two levels with such groups; with 0 those of one level."""
    if not group:
        yield Tree("tree", 0, 0, _log2(size), _log2(size))
        yield Tree("chain", 0, 0, size - 1, 1)
        return
    each = lengths(size, group)
    heads, most = len(each), max(each)
    yield Tree("tree", group, _log2(most), _log2(heads), _log2(most) + _log2(heads))
    yield Tree("chain-chain", group, most - 1, heads - 1, 2)
    yield Tree("chain-binomial", group, most - 1, _log2(heads), 1 + _log2(heads))


def suits(plan: str) -> Callable[[Case], bool]:
    """Return whether a plan is the best one for a case."""
    return lambda case: case.kind in ROOTED and _best_of(case)[0].plan == plan


def tuned(plan: str) -> Callable[[Case], dict[str, Any]]:
    """Return a plan's options for a case: chunks of the best one; else groups, if there are any."""
    name = "group_size" if plan == "tree" else "chain_size"

    def options(case: Case) -> dict[str, Any]:
        group, chunks = case.members.group_size, 0
        if case.kind in ROOTED:
            best, chunks = _best_of(case)
            group = best.group
        elif case.kind not in EXCHANGES:
            group = 0
        found = {name: group} if group and plan != "chain" else {}
        return found | ({"chunks": chunks} if chunks else {})

    return options


def _best_of(case: Case) -> tuple[Tree, int]:
    members = case.members
    crowded = members.oversubscribed
    return best(members.size, case.nbytes, members.group_size, case.kind == "reduce", crowded)


@lru_cache(1024)
def best(size: int, nbytes: int, known: Sizes, adds: bool, crowded: bool) -> tuple[Tree, int]:
    """Return the fastest tree, and its chunks; groups are known, or 0."""
    groups: list[Sizes] = [known] if known else [0, *(1 << n for n in range(1, _log2(size)))]
    inside = LATENCY_INSIDE if known else LATENCY
    across = LATENCY
    if crowded:
        inside = across = LATENCY_CROWDED
    whole = nbytes / BANDWIDTH
    found = []
    for tree in (tree for group in groups for tree in trees(size, group)):
        depth = tree.inside + tree.across
        first = tree.inside * inside + tree.across * across + depth * STARTUP
        for chunks in CHUNKS:
            t = whole / chunks
            step = max(STARTUP + t, tree.width * t) if adds else tree.width * (STARTUP + t)
            time = first + (1 + adds) * depth * t + (chunks - 1) * step
            found.append((time, chunks, tree))
    _, chunks, tree = min(found, key=lambda each: each[0])
    return tree, chunks


def _log2(n: int) -> int:
    return (n - 1).bit_length()
