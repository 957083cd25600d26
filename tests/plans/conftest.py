"""Prints the mutation score at the end of a run."""

from __future__ import annotations

from collections import Counter
from typing import Any

from plan_tools import SCORE


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """For each way to make mutants: killed, of those that must be; and why the others are right."""
    for how in sorted({how for how, _ in SCORE}):
        came = Counter({what: n for (each, what), n in SCORE.items() if each == how})
        killed, survived = came.pop("killed", 0), came.pop("survived", 0)
        excused = "; ".join(f"{n} right: {why}" for why, n in came.most_common())
        line = f"mutation score, {how}: {killed} of {killed + survived} killed"
        terminalreporter.write_line(f"{line}; {excused}" if excused else line)
