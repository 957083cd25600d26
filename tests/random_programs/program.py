"""A random program as data: what every rank does, step by step.

All ranks hold the same program. Where they differ, a step has a list with one entry for each rank
of the world.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

PER_WORLD = 32  # programs that follow one another in one world, unless a rank leaves it


@dataclass(frozen=True)
class World:
    """The ranks that run some programs, and their adversary (only loopback has one)."""

    number: int
    size: int
    adversary: dict[str, Any] = field(default_factory=dict)

    @property
    def mapped(self) -> bool:
        """Whether plans may load and store peers' memory."""
        return bool(self.adversary.get("mapped", True))


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes
    ----------
    what : name of the step; ``rank.py`` finds the function by it
    given : its arguments
    makes, uses : names of the objects that the step creates, and of those that it needs
    """

    what: str
    given: dict[str, Any]
    makes: str = ""
    uses: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = ", ".join(f"{name}={value!r}" for name, value in self.given.items())
        return f"{f'{self.makes} = ' if self.makes else ''}{self.what}({words})"


@dataclass(frozen=True)
class Program:
    """A seed's program."""

    seed: int
    world: World
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, {self.world.size} ranks, adversary {self.world.adversary}"]
        lines += [f"{number:3} {step}" for number, step in enumerate(self.steps)]
        return "\n".join(lines)

    @property
    def leaves(self) -> str:
        """How a rank leaves in this program, or empty; after a rank leaves, a new world begins."""
        return next((each.given["how"] for each in self.steps if each.what == "leave"), "")

    def only(self, kept: Sequence[int]) -> Program:
        """The program without the other steps, and without those that need their objects."""
        made = {"world"}
        steps = []
        for number in kept:
            step = self.steps[number]
            if made.issuperset(step.uses):
                steps.append(step)
                made.add(step.makes)
        return replace(self, steps=tuple(steps))
