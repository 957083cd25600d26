"""A training job and its server (MiMatrix): all ranks obey a user's command at the same iteration.

That needs no barrier and no message of its own. Rank 0 writes a command to all ranks, and
the number of the last one travels as one element of a layer that is exchanged anyway: the others
add 0 to it. When the exchange of iteration k is over all ranks know the number, and obey at k + 2.
Numbers travel modulo 64, so that they are exact in every dtype and for up to 1024
ranks; no more than 16 commands are ever under way.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, Self

from pgasdl.context import Context
from pgasdl.errors import (
    ConfigError,
    JobError,
    MismatchError,
    PeerLostError,
    PgasError,
    PgasTimeoutError,
    PlanError,
)
from pgasdl.group import Group
from pgasdl.jobs.board import Board
from pgasdl.jobs.link import Link
from pgasdl.jobs.mailbox import PLACES, Mailbox
from pgasdl.jobs.messages import METRICS, NAME, Command, Event, Metrics
from pgasdl.jobs.schema import check

log = logging.getLogger("pgasdl")

Handler = Callable[[Any], object]

MODULUS = 64
_LAST: dict[str, int] = {}  # by a job's link: the last command that this process has obeyed
_BY_THE_LOOP = ("start", "pause", "resume", "set", "stop")  # no handler makes them


def connect(context: Context, *, group: Group | None = None, paused: bool = False) -> TrainingJob:
    """Connect a training to the job server that started it. Collective, if there is one.

    Where no job server started this process all calls work and do nothing. A program may connect
    again, as its ranks that are left do: what was obeyed is not obeyed once more.

    Parameters
    ----------
    context : Context
        The context of this rank.
    group : Group, optional
        The ranks that train; its first one has the connection. None: all ranks.
    paused : bool, default False
        The first iteration waits for the command ``start``.

    Returns
    -------
    TrainingJob
        For handlers and the loop.
    """
    group = group or context.world
    file = context.config.job_link
    if file is None:
        return TrainingJob(context, group, None, None, None)
    mailbox, board = Mailbox(context, group), Board(context, group)
    link = Link(Path(file), mailbox.ring, _LAST.get(file, 0)) if mailbox.posts else None
    return TrainingJob(context, group, mailbox, board, link, paused=paused)


class TrainingJob:
    """A job that a user talks to, on this rank: made by :func:`connect`.

    Attributes
    ----------
    iteration : int
        The present one, from the last :meth:`begin`.
    stopped : bool
        A user has stopped it.
    """

    def __init__(
        self,
        context: Context,
        group: Group,
        mailbox: Mailbox | None,
        board: Board | None,
        link: Link | None,
        *,
        paused: bool = False,
    ) -> None:
        self.iteration, self.stopped = 0, False
        self._context, self._group = context, group
        self._mailbox, self._board, self._link = mailbox, board, link
        self._handlers: dict[str, Handler] = {}
        self._waiting = paused
        # Numbers of commands: posted by rank 0, obeyed here, obeyed by all as rank 0 has told.
        self._posted = self._obeyed = self._settled = 0
        self._outcomes: deque[Event] = deque()  # rank 0's own, of commands that are not settled
        self._given: tuple[int, int] | None = None  # iteration, and the last number obeyed by then
        self._stamps: deque[tuple[int, int]] = deque()  # iteration, and the last number then
        self._closing = weakref.finalize(self, link.close if link else lambda: None)

    # --- what programs call

    @property
    def elements(self) -> int:
        """How many elements the job needs in a layer that is exchanged: 1; without a server 0."""
        return 0 if self._mailbox is None else 1

    def on(self, name: str) -> Callable[[Handler], Handler]:
        """Register a function of the command's value; the same on every rank.

        ``@job.on("learning-rate")`` is called by ``pgasdl job send ID learning-rate 0.1``, and by
        ``set`` of this name. ``evaluate`` and ``checkpoint`` are built in, without a value (None);
        other names are the program's own, with any JSON of at most 4 KiB. If a function raises, the
        error goes to the user as an event, and to the log; the training goes on, so a function
        checks a value before it changes anything. PeerLostError, PgasTimeoutError and MismatchError
        end the training.

        Raises
        ------
        ConfigError
            The name is no name, is one that the loop obeys itself, or has a function already.
        """
        try:
            check(name, NAME, "name")
        except JobError as error:
            raise ConfigError(f"@job.on: {error}") from error
        if name in _BY_THE_LOOP:
            raise ConfigError(f"@job.on({name!r}): the loop itself obeys {', '.join(_BY_THE_LOOP)}")
        if name in self._handlers:
            raise ConfigError(f"@job.on({name!r}): it has a function already")

        def register(function: Handler) -> Handler:
            self._handlers[name] = function
            return function

        return register

    def iterations(self, first: int, last: int) -> Iterator[int]:
        """Yield iterations from ``first`` to before ``last``, unless a user stops them."""
        for iteration in range(first, last):
            if not self.begin(iteration):
                return
            yield iteration

    def begin(self, iteration: int) -> bool:
        """Begin an iteration: obey what is due. Every rank calls it with the same iterations.

        Returns
        -------
        bool
            Whether to go on: False after ``stop``.

        Raises
        ------
        PlanError
            The element of the iteration before the last was not taken: its exchange is not over.
        PgasTimeoutError
            A command has not come.
        MismatchError
            This rank has no function for a command, as rank 0 has.
        PeerLostError
            A rank died, also while all are paused.
        TypeError, JobError
            The iteration is no integer, or negative.
        """
        check(iteration := index(iteration), METRICS["properties"]["iteration"], "iteration")
        self.iteration = iteration
        if self._mailbox is None:
            return True
        if self._given is not None and self._given[0] <= iteration - 2:
            raise PlanError(
                f"rank {self._context.rank}: iteration {iteration} begins, but job.take() was not "
                f"called for iteration {self._given[0]}: wait for its exchange before"
            )
        due = self._obeyed
        while self._stamps and self._stamps[0][0] <= iteration - 2:
            due = self._stamps.popleft()[1]
        while (self._waiting or self._obeyed < due) and not self.stopped:
            self._obey()
        self._settle()
        while self._post():
            pass
        self._look()
        return not self.stopped

    def give(self, element: Any) -> None:
        """Put the job's element, a view of :attr:`elements` elements, into a layer.

        Call it before the layer's exchange starts, once in an iteration at most.

        Raises
        ------
        PlanError
            The last one was not taken.
        """
        if not len(element):
            return
        if self._given is not None:
            raise PlanError("job.give(): take the last one first, after its exchange")
        self._given = self.iteration, self._obeyed
        element[0] = self._posted % MODULUS  # 0 but on rank 0

    def take(self, element: Any) -> None:
        """Read the mean of the job's elements, after the exchange of the layer."""
        if not len(element) or self._given is None:
            return
        iteration, obeyed = self._given
        self._given = None
        remainder = round(float(element[0]) * self._group.size)
        self._stamps.append((iteration, obeyed + (remainder - obeyed) % MODULUS))

    def metrics(self, numbers: Mapping[str, float]) -> None:
        """Send numbers of this iteration, by name, to users; rank 0's. It never waits.

        Raises
        ------
        TypeError, JobError
            What is no number; more than 100; a name with more than letters, digits and ``_./-``.
        """
        self._tell(Metrics(self.iteration, time.time(), numbers))

    def event(self, name: str, text: str = "") -> None:
        """Report that something happened, as :meth:`metrics` does; JobError: a wrong name."""
        self._tell(Event(self.iteration, time.time(), name, text))

    def _tell(self, message: Metrics | Event) -> None:
        if self._link is not None:
            self._link.tell(message)
        else:
            message.as_json()  # raises here, too

    def close(self) -> None:
        """Send what is left, and end the connection. Also at the end of the process. Idempotent."""
        if self._closing.alive and not self._context.closed:
            with suppress(PgasError):  # an error that led here matters more
                self._settle()
                self._look(last=True)
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look(self, *, last: bool = False) -> None:
        """Keep this rank's counters, and on rank 0 report those of other ranks."""
        if self._board is not None:
            for record in self._board.look(self.iteration, last=last):
                assert self._link is not None
                self._link.tell_counters(record)

    # --- commands

    def _post(self) -> bool:
        """On rank 0, write the next command to all ranks, if there is one and all have room."""
        if self._link is None or self._posted - self._settled >= PLACES:
            return False
        assert self._mailbox is not None
        while self._link.commands:
            command = self._link.commands.popleft()
            if self._handler_of(command) is None:
                known = ", ".join((*_BY_THE_LOOP, *self._handlers))
                text = f"{command}: no function for it; there are {known}"
                self._link.tell(self._event("refused", text, command))
                continue
            self._mailbox.post(self._posted + 1, command)
            self._posted += 1
            return True
        return False

    def _obey(self) -> None:
        """Obey the next command; wait for it while all are paused."""
        assert self._mailbox is not None
        if self._waiting:
            if self._link is not None:
                while self._posted == self._obeyed and not self._post():
                    self._mailbox.await_bell()
            self._mailbox.await_post(self._obeyed + 1)
        command = self._mailbox.read(self._obeyed + 1)
        self._obeyed += 1
        _LAST[self._context.config.job_link or ""] = command.number
        handler = self._handler_of(command)
        if handler is None:
            raise MismatchError(
                f"rank {self._context.rank} has no function for {command.name!r}, as rank "
                f"{self._group.ranks[0]} has: register the same @job.on(...) on every rank"
            )
        told, text = "obeyed", str(command)
        try:
            handler(command.value["value"] if command.name == "set" else command.value)
        except (PeerLostError, PgasTimeoutError, MismatchError):
            raise
        except Exception as error:  # a mistyped value must not end the training
            log.exception("rank %d: command %s", self._context.rank, command)
            told, text = "failed", f"{command}: {type(error).__name__}: {error}"
        self._mailbox.tell(self._obeyed, failed=told == "failed")
        if self._link is not None:
            self._outcomes.append(self._event(told, text, command))
            self._settle(wait=self._waiting or self.stopped)

    def _settle(self, *, wait: bool = False) -> None:
        """On rank 0, report the outcomes of commands that all ranks have obeyed."""
        while self._outcomes:
            assert self._mailbox is not None and self._link is not None
            failures = self._mailbox.failures(self._settled + 1, wait=wait)
            if failures is None:
                return
            self._settled += 1
            event = self._outcomes.popleft()
            if failures:
                text = f"{event.text} (on {failures} other ranks: see the log)"
                event = replace(event, name="failed", text=text)
            self._link.tell(event)

    def _event(self, name: str, text: str, command: Command) -> Event:
        return Event(self.iteration, time.time(), name, text, command.number)

    def _handler_of(self, command: Command) -> Handler | None:
        if command.name == "set":
            return self._handlers.get(command.value["name"])
        if command.name in _BY_THE_LOOP:
            return lambda _: self._steer(command.name)
        return self._handlers.get(command.name)

    def _steer(self, name: str) -> None:
        self._waiting, self.stopped = name == "pause", name == "stop"
