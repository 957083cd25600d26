"""The set-up of groups: members find each other in the store, and watch for losses meanwhile."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pgasdl import _native
from pgasdl.errors import MismatchError, PeerLostError, PgasTimeoutError
from pgasdl.runtime.bootstrap.store import bitmap

if TYPE_CHECKING:
    from pgasdl.runtime.bootstrap import Store

_NOTICE_SECONDS = 3.0  # ten times what a context needs to notice the end of a rank of its machine


class GroupSetup:
    """Forms groups through the store; ``accepted`` are the losses that ``survivors()`` accepted."""

    def __init__(self, store: Store, *, survivable: bool = True) -> None:
        self._store = store
        self._advice = "; ctx.survivors() gives the group of those left" if survivable else ""
        self._numbers: dict[tuple[int, ...], int] = {}
        self._unfinished: dict[tuple[int, ...], tuple[_native.GroupCore, bytes]] = {}
        self._given_up: list[_native.GroupCore] = []  # late members may still write to them
        self._inside: dict[tuple[int, ...], object] = {}  # the thread that forms each
        self.accepted: frozenset[int] = frozenset()

    def form(
        self, context: _native.ContextCore, members: tuple[int, ...], limit: float
    ) -> _native.GroupCore:
        """Exchange descriptions with ``members``, in ascending order, all reachable."""
        me = object()
        if self._inside.setdefault(members, me) is not me:
            raise MismatchError(
                f"two threads of rank {context.rank} form a group of the same ranks at once: "
                f"this one is refused, the other continues (group {_words(members)})"
            )
        try:
            return self._form(context, members, limit)
        finally:
            del self._inside[members]

    def give_up(self, members: tuple[int, ...]) -> None:
        """Let the next group of ``members`` be another one than the one that was not completed."""
        if members in self._unfinished and members not in self._inside:
            self._given_up.append(self._unfinished.pop(members)[0])
            self._numbers[members] = self._numbers.get(members, 0) + 1

    def _form(
        self, context: _native.ContextCore, members: tuple[int, ...], limit: float
    ) -> _native.GroupCore:
        unfinished = self._unfinished.get(members)
        if unfinished is None:
            core = _native.GroupCore(context, list(members))
            # Only once: every description is a datagram to each member.
            unfinished = self._unfinished[members] = core, core.describe()
        core, description = unfinished
        number = self._numbers.get(members, 0)
        # A rank that is left alone needs no other rank, not even the one that serves the store.
        descriptions = [description]
        if len(members) > 1:
            descriptions = self._exchange(context, members, number, description, limit)
        core.attach(descriptions, context.timeout)
        del self._unfinished[members]
        self._numbers[members] = number + 1
        return core

    def _exchange(
        self,
        context: _native.ContextCore,
        members: tuple[int, ...],
        number: int,
        description: bytes,
        limit: float,
    ) -> list[bytes]:
        """Return every member's description. Raises PeerLostError when any rank of the job is lost.

        The store only reports an owner whose connection ended. It reports neither a stopped owner
        nor a third rank whose loss keeps the owner away.
        """
        # Thousands of members do not fit into a key, nor into the values of them all: the key has
        # half of their digest, each value all of it.
        mine = hashlib.sha256(bitmap(members, context.size)).digest()
        key = f"group/{mine[:16].hex()}/{number}"
        deadline = time.monotonic() + limit

        def look() -> None:
            self._require_nobody_lost(context, "group")

        try:
            self._store.go_on_without(self.accepted, limit or self._store.timeout, look)
            self._store.put(f"{key}/{context.rank}", mine + description, limit or None)
            remaining = max(0.0, deadline - time.monotonic())
            values = self._store.gather(key, members, remaining, look=look)
        except PgasTimeoutError as error:
            raise PgasTimeoutError(f"group of ranks {_words(members)}: {error}") from None
        except PeerLostError as error:
            self._notice(context, error)
            raise
        for member, value in zip(members, values, strict=True):
            if not value.startswith(mine):
                raise MismatchError(
                    f"group of ranks {_words(members)}: rank {member} means another group by {key}"
                )
        return [value[len(mine) :] for value in values]

    def _notice(self, context: _native.ContextCore, error: PeerLostError) -> None:
        """Raise PeerLostError once the context has noticed the loss that the store reports.

        The connection to the store may end first: then survivors() would include the lost rank. And
        that rank may have left because of a loss that is not noticed here yet.
        """
        deadline = time.monotonic() + _NOTICE_SECONDS
        while True:
            self._require_nobody_lost(context, "group")
            if time.monotonic() > deadline or context._health()[error.rank] != "healthy":
                return
            time.sleep(0.001)

    def _require_nobody_lost(self, context: _native.ContextCore, during: str) -> None:
        """Raise PeerLostError for a loss that ``survivors()`` has not accepted."""
        context._require_peer(context.rank, during)
        lost = [
            rank
            for rank, state in enumerate(context._health())
            if state not in ("healthy", "closed") and rank not in self.accepted
        ]
        if lost:
            words = ", ".join(map(context._loss_in_words, lost))
            raise PeerLostError(
                f"{words}, noticed during {during} on rank {context.rank}{self._advice}",
                lost[0] if len(lost) == 1 else -1,
            )


def _words(members: Sequence[int]) -> str:
    if len(members) <= 16:
        return ", ".join(map(str, members))
    return f"{', '.join(map(str, members[:15]))} ... {members[-1]} ({len(members)} of them)"
