"""The generator's state: which objects exist, what is under way, and the random numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from program import Step, World

SUMS = (
    "gdraa", "tree", "kary", "chain", "chain-chain", "chain-binomial", "ring", "halving-doubling",
)  # fmt: skip
_ROOTED = ("tree", "kary", "chain", "chain-binomial")
_BLOCKS = ("gdraa", "ring", "halving-doubling")
PLANS = {
    "allreduce": SUMS,
    "sum": SUMS,
    "average": SUMS,
    "update": SUMS,
    "reduce": _ROOTED,
    "broadcast": _ROOTED,
    "reduce-scatter": _BLOCKS,
    "all-gather": _BLOCKS,
    "all-to-all": ("all-to-all",),
}
FLOATS = ("float32", "float64", "float16", "bfloat16")
DTYPES = (*FLOATS, "int32", "int64")
ARRAYS = 12 << 12  # where a segment's arrays begin; before is what memory.py transfers
ARRAYS_BYTES = 1 << 15
_COUNTS = (1, 3, 16, 33, 100, 100, 1000, 5000)
# Calls that must be refused at once, by the kind of object that they need; wrong.py makes them.
WRONG = {
    "": (
        "allreduce dtype", "allreduce strides", "allreduce readonly", "allreduce op",
        "allreduce plan", "handle plan", "handle op", "handle dtype", "handle kind", "handle out",
        "group twice", "group rank", "segment size", "segment notifications", "bind readonly",
        "exchange plan", "exchange kind", "exchange dtype", "exchange update", "exchange wire",
        "passive rank", "passive length", "reduce op", "reduce objects", "ping rank",
        "pool size", "pool full", "pool objects",
    ),
    "segment": ("write bounds", "write rank", "notify value", "notify id", "view bounds"),
    "exchange": ("no layer",),
}  # fmt: skip
_BAD_TIMEOUTS = ("-1", "nan", "x")


@dataclass
class Object:
    """The generator's knowledge of an object."""

    group: str
    dtype: str = ""
    count: int = 0
    kind: str = ""
    segment: str = ""  # the one that contains it
    layers: int = 0


class Account:
    """The state of one program."""

    def __init__(self, seed: int, world: World, features: set[str], mapped: bool) -> None:
        self.dice = random.Random(f"program {seed}")
        self.world = world
        self.mapped = mapped and world.mapped
        self.features = features
        self.leaves = self.chance(1 / 12, "leave")
        self.n_made = self.n_keys = 0
        self.groups: dict[str, tuple[int, ...]] = {"world": tuple(range(world.size))}
        self.warm: set[str] = set()  # groups whose workspace exists
        self.segments: dict[str, Object] = {}
        self.arrays: dict[str, Object] = {}
        self.handles: dict[str, Object] = {}
        self.exchanges: dict[str, Object] = {}
        # Calls under way, and what nobody may use meanwhile; ``ordered``: must end in this order.
        self.held: dict[str, set[str]] = {}
        self.ordered: list[str] = []

    # --- small decisions

    def name(self, letter: str) -> str:
        self.n_made += 1
        return f"{letter}{self.n_made}"

    def key(self) -> int:
        self.n_keys += 1
        return self.n_keys

    def chance(self, probability: float, feature: str = "") -> bool:
        return (not feature or feature in self.features) and self.dice.random() < probability

    def some_group(self) -> str:
        usual = "world" if "world" in self.groups else "left"
        return usual if self.chance(0.6) else self.dice.choice(list(self.groups))

    def count(self, group: str, kind: str) -> int:
        count = self.dice.choice(_COUNTS)
        if self.chance(0.02):
            count = self.dice.choice((70_000, 300_000))
        return count if kind != "all-to-all" else count * len(self.groups[group])

    def plan(self, kind: str, in_segment: bool) -> str | None:
        """A plan that offers the kind; None: the one that selection chooses."""
        plans = PLANS[kind]
        if kind in ("sum", "average") and self.chance(0.2, "ownplan"):
            return "twice"
        if self.chance(0.3):
            return None
        if self.mapped and kind in ("allreduce", "sum", "average") and self.chance(0.3):
            return "gdraa-direct" if in_segment else "staged"
        return self.dice.choice(plans)

    def attempts(self, *, feature: str = "timeouts") -> dict[str, Any]:
        """The timeouts that each rank tries before it waits for good, and how late it comes."""
        size = self.world.size
        attempts: list[list[float | str]] = [[] for _ in range(size)]
        if self.chance(0.4, feature):
            for rank in range(size):
                attempts[rank] += self.dice.choices(
                    (0, 0, 0.0002, 0.001), k=self.dice.choice((0, 1, 1, 3))
                )
        if self.chance(0.1, "refusals"):
            rank = self.dice.randrange(size)
            attempts[rank].insert(
                self.dice.randint(0, len(attempts[rank])), self.dice.choice(_BAD_TIMEOUTS)
            )
        lag = [0.0] * size
        if self.chance(0.15):
            lag[self.dice.randrange(size)] = 0.001
        return {"attempts": attempts, "lag": lag}

    def free(self, *needed: str) -> list[Step]:
        """Complete what is under way if it keeps one of these busy."""
        busy = any(not kept.isdisjoint(needed) for kept in self.held.values())
        return self.complete() if busy else []

    def hold(self, kept: set[str], ordered: bool, feature: str = "timeouts") -> str:
        """Maybe leave a call under way; its name, or an empty string."""
        if not ({"hold", feature} <= self.features and self.chance(0.35)):
            return ""
        name = self.name("p")
        self.held[name] = kept
        if ordered:
            self.ordered.append(name)
        return name

    def complete(self) -> list[Step]:
        """Complete all calls: plans in each rank's own order, then ``ordered`` in its order."""
        if not self.held:
            return []
        free = [name for name in self.held if name not in self.ordered]
        orders = [self.dice.sample(free, len(free)) for _ in range(self.world.size)]
        polls = [self.dice.choices(free, k=self.dice.choice((0, 2, 5))) if free else []
                 for _ in range(self.world.size)]  # fmt: skip
        given = {"polls": polls, "orders": orders, "then": list(self.ordered)}
        self.held.clear()
        self.ordered.clear()
        return [Step("complete", given)]
