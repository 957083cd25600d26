"""Pairwise: right for every pattern of blocks, in any turn, and wrong with any step missing."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
from plan_tools import deletions
from tiers import full

from pgasdl.errors import PlanError
from pgasdl.plans import Plan, Put, Reduce, Span, Wait, validate_all
from pgasdl.plans.algorithms.pairwise import SLOTS, Blocks, build
from pgasdl.plans.checker.happens_before import happens_before

PIECE, MOST = 4, 7
WAYS = ("mapped", "put", "direct")
PATTERNS = (
    "broadcast",
    "all-gather",
    "gather",
    "scatter",
    "all-to-all",
    "reduce",
    "reduce-scatter",
)


@dataclass(frozen=True)
class Case:
    """The values that ranks have for each other."""

    pattern: str
    size: int
    n: int
    way: str  # "mapped", "put" from slots, or "direct"ly from where blocks lie
    seed: int = 0

    @cached_property
    def root(self) -> int:
        return self.seed % self.size

    @cached_property
    def lengths(self) -> list[list[int]]:
        """``lengths[sender][receiver]`` elements."""
        dice, ranks = random.Random(self.seed), range(self.size)
        if self.pattern == "all-to-all":
            return [[dice.randint(0, self.n) for _ in ranks] for _ in ranks]
        if self.pattern == "reduce-scatter":
            return [[dice.randint(0, self.n) for _ in ranks]] * self.size
        sends = [self.root] if self.pattern in ("broadcast", "scatter") else ranks
        takes = [self.root] if self.pattern in ("gather", "reduce") else ranks
        return [[self.n if s in sends and r in takes else 0 for r in ranks] for s in ranks]

    @cached_property
    def same(self) -> bool:
        return self.pattern in ("broadcast", "all-gather")

    @cached_property
    def reduces(self) -> bool:
        return self.pattern.startswith("reduce")

    def plans(self) -> list[Plan]:
        longest = max(map(max, self.lengths))
        found = []
        for rank, sends in enumerate(self.lengths):
            receives = tuple(row[rank] for row in self.lengths)
            blocks = Blocks(tuple(sends), receives, longest, self.same, self.reduces)
            how = {"mapped": self.way == "mapped", "direct": self.way == "direct"}
            found.append(build(rank, blocks, piece=PIECE, most=MOST, **how))
        return found

    def due(self, rank: int, number: int) -> list[Any]:
        """The right content of a rank's buffer ``take`` and the number: who gave what."""
        name = "give0" if self.same else f"give{rank}"
        senders = range(self.size) if self.reduces else (number,)
        length = self.lengths[senders[0]][rank]
        due = [[(sender, name, at) for sender in senders] for at in range(length)]
        return due + [None] * (max(map(max, self.lengths)) - length)

    def faults(self, plans: list[Plan]) -> list[str]:
        """Say what is wrong with all ranks' plans."""
        try:
            validate_all(plans)
        except PlanError as error:
            return [str(error)]
        if found := happens_before([plans], 3):
            return list(map(str, found))
        return [
            f"{name} of rank {rank}"
            for (rank, name), elements in run(plans, self.seed).items()
            if name.startswith("take") and elements != self.due(rank, int(name[4:]))
        ]


def run(plans: list[Plan], seed: int) -> dict[tuple[int, str], list[Any]]:
    """Run plans without deadlocks in some order; return what is in all ranks' buffers."""
    dice = random.Random(seed)
    memory: dict[tuple[int, str], list[Any]] = {}
    for plan in plans:
        for name, elements in plan.buffers.items():
            given = name.startswith("give")
            whole = [[(plan.rank, name, at)] if given else None for at in range(elements)]
            memory[plan.rank, name] = whole
    left = [list(plan.lanes[0]) for plan in plans]
    flags: set[tuple[int, int | None]] = set()

    def waits(rank: int) -> bool:
        step = left[rank][0]
        return isinstance(step, Wait) and (rank, step.notification) not in flags

    while ready := [rank for rank, steps in enumerate(left) if steps and not waits(rank)]:
        rank = dice.choice(ready)
        step = left[rank].pop(0)

        def values(of: Span, n: int, rank: int = rank) -> list[Any]:
            whole = memory[rank if of.rank is None else of.rank, of.buffer]
            return whole[of.offset : of.offset + n]

        if isinstance(step, Put):
            target = memory[step.peer, step.dst.buffer]
            target[step.dst.offset : step.dst.offset + step.n] = values(step.src, step.n)
            flags.add((step.peer, step.notify))
        elif isinstance(step, Reduce):
            rows = zip(*(values(src, step.n) for src in step.srcs), strict=True)
            (dst,) = step.dsts
            total = [[who for each in row for who in each or ["nothing"]] for row in rows]
            memory[rank, dst.buffer][dst.offset : dst.offset + step.n] = total
    return memory


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("size", full([3, 1, 2, 5, 8], quick=3))
def test_it_is_right(size: int, pattern: str, way: str) -> None:
    for n in (1, PIECE, PIECE + 1, SLOTS * PIECE, MOST * PIECE):
        for seed in range(4):
            case = Case(pattern, size, n, way, seed)
            assert case.faults(case.plans()) == [], case


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", full(range(12), quick=4))
def test_patterns_take_turns(seed: int, way: str) -> None:
    """On one inbox and one set of notifications, whatever comes next."""
    dice = random.Random(seed)
    lengths = (1, PIECE, 3 * PIECE + 1, MOST * PIECE)
    turns = [
        Case(dice.choice(PATTERNS), 2 + seed % 4, dice.choice(lengths), way, dice.randrange(99))
        for _ in range(10)
    ]
    assert happens_before([case.plans() for case in turns], len(turns)) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_step_can_be_deleted(pattern: str, way: str) -> None:
    case = Case(pattern, 3, (SLOTS + 1) * PIECE + 1, way, seed=1)
    plans = case.plans()
    assert case.faults(plans) == []
    assert [text for text, mutant in deletions(plans) if not case.faults(mutant)] == []
