"""Ours beside others, in turns: one table, whatever is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pgasdl.context import Context
from pgasdl.tools.bench.output import Report, ratio, short
from pgasdl.tools.bench.session import Session
from pgasdl.tools.bench.turns import PATIENCE, Contender, best_of, usual

Groups = Mapping[str, Sequence[Contender]]
_COLUMNS = {"": 14, "bytes": 10, "who": 16, "us": 10, "least": 10, "p90": 10, "MB/s": 9,
            "x first": 8, "placed": 15, "how": 30}  # fmt: skip


class Comparison:
    """Prints a row for the best contender of each group; all are compared with the first group."""

    def __init__(self, session: Session) -> None:
        self._session, self._table = session, Report(session.output, _COLUMNS)
        self.rows, self.end = self._table.rows, self._table.close

    def begin(self) -> None:
        """Print the table's headings."""
        rounds = self._session.rounds
        self._session.say(f"figures    microseconds, medians of {rounds} rounds in turns")
        self._table.begin()

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
            times = [short(us) for us in (samples.median, samples.least, samples.p90)]
            rate = short(nbytes / samples.median)
            multiple = ratio(samples.median, first)
            self._table.add(row, (op, str(nbytes), who, *times, rate, multiple, where, best.name))


def asked(
    context: Context, ask: Callable[[int], Sequence[float]] | None
) -> Callable[[int], Sequence[float]]:
    """Return a function that measures by asking other jobs on rank 0; the other ranks sleep."""

    def measure(calls: int) -> Sequence[float]:
        times = ask(calls) if ask is not None else []
        context.barrier(timeout=PATIENCE)
        return times

    return measure
