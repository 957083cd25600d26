"""The figures of this machine for ``plans.cost``: latency, startup, beta, gamma by class of pairs.

All ranks measure at once, through the executor, plans whose cost has few terms. A binomial tree of
one cache line costs 2 log P latencies; GDRAA of P cache lines costs P - 1 startups more; an
all-gather costs only bytes, and the rest of GDRAA's cost is additions. Plan staged costs a latency,
its loads from peers, and a copy. All these depend on whether the array lies in caches, so they are
measured at several sizes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np

from pgasdl.group import Group
from pgasdl.plans.cost import Model, Pair
from pgasdl.plans.plan import Sizes, begins
from pgasdl.tools.bench.ours import Array, Ours
from pgasdl.tools.bench.session import Session
from pgasdl.tools.bench.turns import Contender

SIZES = (64 << 10, 1 << 20, 8 << 20)
LINE = 16  # elements
# Lower limits, against noise: seconds, and seconds per byte.
_LEAST, _LEAST_BETA = 1e-9, 1e-13


@dataclass(frozen=True, slots=True)
class Class:
    """One class of pairs of ranks; figures per byte at each of ``SIZES``."""

    name: str
    ranks: int
    latency: float
    startup: float
    beta: tuple[float, ...]
    gamma: tuple[float, ...]
    remote: tuple[float, ...]
    copy: tuple[float, ...]

    def at(self, figures: Sequence[float], nbytes: int) -> float:
        """Return a figure for an array of ``nbytes``."""
        sizes = [math.log(size) for size in SIZES]
        return float(np.interp(math.log(max(1, nbytes)), sizes, figures))

    def __str__(self) -> str:
        rates = ", ".join(
            f"{1e-9 / beta:.3g} / {1e-9 / gamma if gamma else math.inf:.3g} GB/s at {size >> 10}K"
            for size, beta, gamma in zip(SIZES, self.beta, self.gamma, strict=True)
        )
        return (
            f"{self.name} ({self.ranks} ranks): latency {1e6 * self.latency:.2f} us, startup "
            f"{1e6 * self.startup:.2f} us, bytes / additions {rates}"
        )


@dataclass(frozen=True, slots=True)
class Calibration:
    """The figures of one class of pairs, or of two."""

    inside: Class
    across: Class | None
    per_node: Sizes
    blocking: bool

    def model(self, nbytes: int) -> Model:
        """Return the model for plans that work on an array of ``nbytes``."""
        far = self.across

        def pair(of: Class) -> Pair:
            return Pair(of.latency, of.at(of.beta, nbytes), of.startup)

        return Model(
            pair(self.inside),
            None if far is None else pair(far),
            self.per_node,
            gamma=self.inside.at(self.inside.gamma, nbytes),
            remote=self.inside.at(self.inside.remote, nbytes),
            copy=self.inside.at(self.inside.copy, nbytes),
            blocking=self.blocking,
        )

    def dump(self) -> str:
        """Return JSON, for a comment in a policy file."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class _Members:
    """Ranks whose pairs form one class; ``group`` is None on other ranks."""

    name: str
    group: Group | None
    size: int
    mapped: bool


def calibrate(session: Session) -> Calibration:
    """Measure the machine. Collective; every rank gets the same figures."""
    context = session.context
    size, node, members = context.size, context.world.node_size, context.world.members
    if not members.several_nodes:
        name = "across nodes" if members.nodes > 1 else "one node"
        world = _Members(name, context.world, size, context.mapped)
        return Calibration(_class(world, session), None, node, context.mapped)
    ranks = members.order or tuple(range(size))
    nodes = [ranks[begin:end] for begin, end in pairwise(begins(size, node))]
    mine = context.group(next(some for some in nodes if context.rank in some))
    heads = [some[0] for some in nodes]
    across = context.group(heads) if context.rank in heads else None
    # Smaller nodes only keep time.
    largest = max(map(len, nodes))
    inside = mine if mine.size == largest else None
    near = _class(_Members("inside nodes", inside, largest, mine.mapped), session)
    far = _class(_Members("across nodes", across, len(heads), mapped=False), session)
    return Calibration(near, far, node, context.mapped)


def _class(members: _Members, session: Session) -> Class:
    """Measure the members' pairs; the other ranks only keep time."""
    group, size, ranks = members.group, members.size, session.ranks
    if size == 1:
        zeros = (0.0,) * len(SIZES)
        return Class(members.name, 1, 0.0, 0.0, (_LEAST_BETA,) * len(SIZES), zeros, zeros, zeros)
    context = ranks.context
    count = max(SIZES) // 4
    ours = Ours(session)
    segment = context.segment(4 * count, notifications=1)
    memory = segment.numpy(np.float32)

    def contender(kind: str, plan: str, array: Array, **options: int) -> Contender:
        call: Callable[[], object] = lambda: None  # noqa: E731
        if group is not None:
            call = context.collective_handle(kind, array, plan=plan, group=group, **options).run
        return Contender(f"{plan} {array.size}", ours.uncounted(array, call))

    tree = contender("average", "tree", memory[:LINE])
    scatter = contender("average", "gdraa", memory[: LINE * size])
    arrays = [memory[: nbytes // 4] for nbytes in SIZES]
    gather = [contender("all-gather", "gdraa", array) for array in arrays]
    whole = [contender("average", "gdraa", array) for array in arrays]
    direct, through = [], []
    if members.mapped:
        outside = np.zeros(count, np.float32)
        direct = [contender("average", "gdraa-direct", array) for array in arrays]
        through = [
            contender("average", "staged", outside[: array.size], owners=0) for array in arrays
        ]
    everything = [tree, scatter, *gather, *whole, *direct, *through]
    session.take_turns(everything)
    segment.delete()

    def took(one: Contender) -> float:
        mine = 1e-6 * one.samples().quartile if one.turns else 0.0
        return float(ranks.latest(np.array([mine]))[0])

    hops = 2 * (size - 1).bit_length()
    latency = max(_LEAST, took(tree) / hops)
    startup = 0.0
    if size > 2:
        startup = min(latency, max(0.0, (took(scatter) - 2 * latency) / (2 * (size - 2))))
    share = (size - 1) / size
    beta, gamma, remote, copy = [], [], [], []
    for index, nbytes in enumerate(SIZES):
        per = share * nbytes
        b = max(_LEAST_BETA, (took(gather[index]) - 2 * latency) / per)
        g = max(0.0, (took(whole[index]) - 2 * latency - 2 * per * b) / per)
        beta.append(b)
        gamma.append(g)
        each = 0.0
        if direct:
            each = max(0.0, (took(direct[index]) - 2 * latency) / (2 * per))
        remote.append(each)
        staging = 0.0
        if through:
            staging = max(0.0, (took(through[index]) - latency) / nbytes - (size - 1) * each)
        copy.append(staging)
    return Class(
        members.name,
        size,
        latency=max(_LEAST, latency - startup),
        startup=startup,
        beta=tuple(beta),
        gamma=tuple(gamma),
        remote=tuple(remote),
        copy=tuple(copy),
    )
