"""The way of rank 0's commands to all ranks: one-sided writes into a ring of places on each.

Each rank counts up a notification of rank 0 once it has obeyed; then the place is free.
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
_OBEYED, _BELL = PLACES, 2 * PLACES  # notifications, after those of posts: one a place, and one
_FAILED = 1 << 16  # what a rank that could not obey adds beside 1


class Mailbox:
    """The ring of this rank. Making it is collective; the group's first member posts."""

    def __init__(self, context: Context, group: Group) -> None:
        self._context, self._group = context, group
        self._segment = context.segment(PLACES * _BYTES, notifications=_BELL + 1, group=group)
        self._bytes = self._segment.numpy(np.uint8)
        self._lengths, self._heard = [0] * PLACES, [0] * PLACES
        self._queue = context.queue_create()
        self.posts = group.rank == 0

    def post(self, number: int, command: Command) -> None:
        """Write a command to every rank; all have obeyed the one before in its place."""
        record = json.dumps([command.as_json(), command.number]).encode()
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
        return Command.from_json(*json.loads(self._bytes[begin:end].tobytes()))

    def await_post(self, number: int) -> None:
        """Wait for as long as it takes until a command is posted; PeerLostError ends it."""
        while not self.posts:
            with suppress(PgasTimeoutError):
                self._context.notify_waitsome(self._segment, number % PLACES, 1)
                return

    def tell(self, number: int, *, failed: bool) -> None:
        """Report to rank 0, which knows its own outcome, that this rank has obeyed a command."""
        if not self.posts:
            place, value = _OBEYED + number % PLACES, 1 + failed * _FAILED
            root = self._group.ranks[0]
            self._context.notify_add(root, self._segment, place, value, queue=self._queue)
            self._context.wait(self._queue)

    def failures(self, number: int, *, wait: bool) -> int | None:
        """Return how many other ranks failed at a command; None: not all have told yet.

        ``wait`` for as long as it takes until they have; PeerLostError ends it.
        """
        place = number % PLACES
        while True:
            self._heard[place] += self._context.notify_reset(self._segment, _OBEYED + place)
            failed, heard = divmod(self._heard[place], _FAILED)
            if heard == self._group.size - 1:
                self._heard[place] = 0
                return failed
            if not wait:
                return None
            with suppress(PgasTimeoutError):
                self._context.notify_waitsome(self._segment, _OBEYED + place, 1)

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
