"""The way of rank 0's commands to all ranks: one-sided writes into a ring of places on each.

There are no credits: rank 0 knows from the exchanges that end which commands every rank has read.
"""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np

from pgasdl.context import Context
from pgasdl.errors import PgasError, PgasTimeoutError
from pgasdl.group import Group
from pgasdl.jobs.messages import MOST_VALUE_BYTES, Command

PLACES = 16  # commands that are under way at once
_BYTES = MOST_VALUE_BYTES + 512  # of a place
_READ, _BELL, _FAILED = range(PLACES, PLACES + 3)  # notifications, after one for each place


class Mailbox:
    """The ring of this rank. Making it is collective; the group's first member posts."""

    def __init__(self, context: Context, group: Group) -> None:
        self._context, self._group = context, group
        self._segment = context.segment(PLACES * _BYTES, notifications=PLACES + 3, group=group)
        self._bytes = self._segment.numpy(np.uint8)
        self._lengths = [0] * PLACES
        self._queue = context.queue_create()
        self.posts = group.rank == 0

    def post(self, number: int, command: Command) -> None:
        """Write a command to every rank; all must have read the command before in its place."""
        record = json.dumps(command.as_json()).encode()
        place, (begin, end) = number % PLACES, self._range(number, len(record))
        self._bytes[begin:end] = np.frombuffer(record, np.uint8)
        self._lengths[place] = len(record)
        part = self._segment[begin:end]
        for peer in self._group.ranks[1:]:
            self._context.write_notify(part, peer, part, place, len(record), queue=self._queue)
            self._context.wait(self._queue)

    def read(self, number: int) -> Command:
        """Return a command that was, or is just being, posted; raise a timeout if none comes."""
        place = number % PLACES
        if self.posts:
            length = self._lengths[place]
        else:
            self._context.notify_waitsome(self._segment, place, 1)
            length = self._context.notify_reset(self._segment, place)
        begin, end = self._range(number, length)
        return Command.from_json(json.loads(self._bytes[begin:end].tobytes()))

    def await_post(self, number: int) -> None:
        """Wait for as long as it takes until a command is posted; PeerLostError ends it."""
        while not self.posts:
            with suppress(PgasTimeoutError):
                self._context.notify_waitsome(self._segment, number % PLACES, 1)
                return

    def tell_failure(self) -> None:
        """Report to rank 0, which knows its own failures, that this rank could not obey."""
        if not self.posts:
            self._context.notify_add(
                self._group.ranks[0], self._segment, _FAILED, queue=self._queue
            )
            self._context.wait(self._queue)

    def failures(self) -> int:
        """Return the number of such reports from other ranks since the last call."""
        return self._context.notify_reset(self._segment, _FAILED)

    # --- while all ranks wait

    def acknowledge(self) -> None:
        """Report to rank 0 that this rank has read a command; on rank 0: wait for all reports."""
        if not self.posts:
            self._context.notify_add(self._group.ranks[0], self._segment, _READ, queue=self._queue)
            self._context.wait(self._queue)
        elif self._group.size > 1:
            self._context.notify_wait_count(self._segment, _READ, self._group.size - 1)

    def ring(self) -> None:
        """Wake rank 0, which waits for a command to post. Called by any thread of it."""
        with suppress(PgasError):  # it is leaving
            self._context.notify(self._context.rank, self._segment, _BELL)

    def await_bell(self) -> None:
        """Wait for as long as it takes until something wakes rank 0; PeerLostError ends it."""
        with suppress(PgasTimeoutError):
            self._context.notify_waitsome(self._segment, _BELL, 1)
            self._context.notify_reset(self._segment, _BELL)

    def _range(self, number: int, length: int) -> tuple[int, int]:
        begin = number % PLACES * _BYTES
        return begin, begin + length
