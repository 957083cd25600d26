"""The checker: happens-before, a symbolic run, and the results to be; and what they find."""

from __future__ import annotations

from dataclasses import dataclass

RULES = ("invalid", "deadlock", "race", "notification", "value")


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of a plan.

    ``rule`` is one of :data:`RULES`: invalid (malformed), deadlock, race (two unordered accesses),
    notification (raised again before its Wait), value (wrong, missing or doubled contributions).
    ``rank``, ``lane``, ``step`` are the place; -1 for the application or the whole plan.
    ``iteration`` counts from 0; ``text`` is the event, with the other rank and step.
    """

    rule: str
    plan: str
    rank: int
    lane: int
    step: int
    iteration: int
    text: str

    def __str__(self) -> str:
        """Render the finding in one line."""
        where = f"rank {self.rank}"
        if self.step >= 0:
            where += f", lane {self.lane}, step {self.step}"
        return f"{self.rule}: plan {self.plan}, {where}, iteration {self.iteration}: {self.text}"
