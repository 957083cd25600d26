"""Ours beside others, in turns: one table, whatever is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pgasdl.context import Context
from pgasdl.tools.bench.report import ratio, short
from pgasdl.tools.bench.session import Session
from pgasdl.tools.bench.turns import PATIENCE, Contender, best_of, usual

Groups = Mapping[str, Sequence[Contender]]
_HEADINGS = ("", "bytes", "who", "us", "least", "p90", "MB/s", "x first", "placed")
_WIDTHS = (14, 10, 16, 10, 10, 10, 9, 8, 15)


class Comparison:
    """Prints a row for the best contender of each group; all are compared with the first group."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.rows: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Print the table's headings."""
        self._session.say(
            f"figures    microseconds, medians of {self._session.rounds} rounds in turns, in one "
            "placement"
        )
        self._say(_HEADINGS, "how")

    def measure(self, op: str, nbytes: int, groups: Groups) -> None:
        """Measure all contenders in turns. Collective."""
        contenders = [one for group in groups.values() for one in group]
        self._session.take_turns(contenders, probe=self._session.probe)
        if self._session.context.rank != 0:
            return
        where = usual(contenders)
        first = 0.0
        for who, group in groups.items():
            best = best_of(group, where)
            samples = best.samples(where)
            first = first or samples.median
            row = {
                "op": op,
                "bytes": nbytes,
                "who": who,
                "variant": best.name,
                "us": samples.median,
                "min_us": samples.least,
                "p90_us": samples.p90,
                "placement": where,
            }
            self.rows.append(row)
            times = [short(us) for us in (samples.median, samples.least, samples.p90)]
            rate = short(nbytes / samples.median)
            cells = (op, str(nbytes), who, *times, rate, ratio(samples.median, first), where)
            self._say(cells, best.name)

    def end(self) -> None:
        """Write the rows as JSON, if asked for."""
        self._session.output.write(self.rows)

    def _say(self, cells: Sequence[str], last: str) -> None:
        aligned = [cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True)]
        self._session.say(" ".join([*aligned, f" {last}"]))


def asked(
    context: Context, ask: Callable[[int], Sequence[float]] | None
) -> Callable[[int], Sequence[float]]:
    """Return what measures by asking others on rank 0, which alone knows how; the rest sleeps."""

    def measure(calls: int) -> Sequence[float]:
        times = ask(calls) if ask is not None else []
        context.barrier(timeout=PATIENCE)
        return times

    return measure
