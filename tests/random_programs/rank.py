"""One rank of a random program: its objects, and how it carries out a step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from program import Program, Step

import pgasdl

# Timeouts that a step tries and that must be refused.
BAD_TIMEOUTS = {"-1": -1, "nan": math.nan, "x": "x"}
# Errors that are not refusals, but harm that a refusal must not do.
HARM = (pgasdl.PgasTimeoutError, pgasdl.MismatchError, pgasdl.PeerLostError, pgasdl.ClosedError)

Action = Callable[..., None]
STEPS: dict[str, Action] = {}


class Left(Exception):
    """This rank has left the job, as its program says."""


def step(action: Action) -> Action:
    """Register a function ``(rank, **given)`` to carry out the steps of its name."""
    STEPS[action.__name__] = action
    return action


def refused(call: Callable[[], object], about: str) -> None:
    """Require that the call raises an error about its arguments, at once."""
    try:
        call()
    except HARM:
        raise
    except (pgasdl.PgasError, ValueError, TypeError):
        return
    raise AssertionError(f"{about} was accepted")


@dataclass
class Pending:
    """A call under way: ``call(timeout)`` continues it, ``check()`` checks the result."""

    call: Callable[[Any], object]
    check: Callable[[], None]
    done: bool = False

    def attempt(self, timeout: float | None) -> None:
        """Continue; check the result if it is there, raise PgasTimeoutError if it is not."""
        if not self.done:
            self.call(timeout)
            self.done = True
            self.check()


class Rank:
    """The state of one rank while it runs programs.

    Attributes
    ----------
    ranks_of : the members of a group, by its name; also of groups that this rank is not in
    group_of : the name of an object's group
    objects : what this rank holds
    notes : what the steps remember about an object
    held : calls that were left under way
    """

    def __init__(self, ctx: pgasdl.Context, threads: bool) -> None:
        self.ctx = ctx
        self.rank = ctx.rank
        self.threads = threads  # ranks are threads of one process
        self.at_end: list[Callable[[], None]] = []
        self.mail: dict[tuple[int, bytes], bytes] = {}  # by sender and head
        self.clear()

    def prepare(self) -> Rank:
        """Make what all programs use. Collective."""
        for _ in range(2):
            self.ctx.pool(1 << 22)  # all that a program has at once
        return self

    def clear(self) -> None:
        """Drop everything, even what is under way."""
        self.ranks_of: dict[str, tuple[int, ...]] = {"world": tuple(range(self.ctx.size))}
        self.group_of: dict[str, str] = {}
        self.objects: dict[str, Any] = {"world": self.ctx.world}
        self.notes: dict[str, dict[str, Any]] = {}
        self.held: dict[str, Pending] = {}

    def give_back(self) -> None:
        """Close, on all ranks together, what the context would keep to its end."""
        self.ctx.barrier()
        for exchange in list(self.ctx.state.servers):
            exchange.close(finish=False)
        for thing in self.objects.values():
            if isinstance(thing, (pgasdl.Group, pgasdl.Segment)) and thing is not self.ctx.world:
                thing.delete()
            elif isinstance(thing, pgasdl.Collective):
                thing.close()
        self.clear()

    def run(self, program: Program) -> None:
        """Run a program; an error names the step."""
        self.seed = program.seed
        try:
            for number, each in enumerate(program.steps):
                try:
                    self.do(each)
                except BaseException as error:
                    where = f"rank {self.rank}, step {number} of seed {program.seed}"
                    error.add_note(f"{where}: {each}")
                    raise
        finally:
            while self.at_end:
                self.at_end.pop()()

    def do(self, each: Step) -> None:
        """Carry one step out, if this rank is a member of its group."""
        given = dict(each.given)
        if self.rank not in self.ranks_of[given.get("group", "world")]:
            return
        if each.makes:
            given["name"] = each.makes
        STEPS[each.what](self, **given)

    def member(self, group: str) -> int:
        """This rank's place among the members."""
        return self.ranks_of[group].index(self.rank)

    def made(self, name: str, group: str, thing: object, **notes: Any) -> None:
        """Keep a new object."""
        self.objects[name] = thing
        self.group_of[name] = group
        self.notes[name] = notes

    def carry_out(
        self,
        pending: Pending,
        attempts: Sequence[Sequence[float | str]],
        lag: Sequence[float],
        held: str = "",
        after_timeout: Callable[[], None] | None = None,
    ) -> None:
        """Try as often as the step says; then wait for good, or leave the call under way."""
        if lag[self.rank]:
            time.sleep(lag[self.rank])
        for timeout in attempts[self.rank]:
            if pending.done:
                break
            if isinstance(timeout, str):
                bad = BAD_TIMEOUTS[timeout]
                refused(lambda bad=bad: pending.call(bad), f"timeout {bad!r}")  # type: ignore[misc]
                continue
            try:
                pending.attempt(timeout)
            except pgasdl.PgasTimeoutError:
                if after_timeout is not None:
                    after_timeout()
        if held:
            with contextlib.suppress(pgasdl.PgasTimeoutError):
                pending.attempt(0)  # so that it has begun on all ranks
            self.held[held] = pending
        else:
            pending.attempt(None)

    def create(
        self,
        make: Callable[[Any], object],
        attempts: Sequence[Sequence[float | str]],
        lag: Sequence[float],
    ) -> Any:
        """Make an object collectively; the same call continues after a timeout."""
        found: list[object] = []
        pending = Pending(lambda timeout: found.append(make(timeout)), lambda: None)
        self.carry_out(pending, attempts, lag)
        return found[0]
