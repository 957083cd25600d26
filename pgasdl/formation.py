"""Forming groups: members find each other in the store, and look out for losses meanwhile."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pgasdl import _native
from pgasdl.errors import PeerLost, Timeout
from pgasdl.group import Group

if TYPE_CHECKING:
    from pgasdl.bootstrap import Store
    from pgasdl.context import Context

_LOOK_SECONDS = 0.1  # between two looks for losses, while the store is waited for


class Formation:
    """The groups of one context that are, or are being, formed.

    Attributes
    ----------
    accepted : ranks whose loss ``survivors()`` took note of
    """

    def __init__(self, context: Context, store: Store) -> None:
        self._context = context
        self._store = store
        self._numbers: dict[tuple[int, ...], int] = {}
        self._unfinished: dict[tuple[int, ...], tuple[_native.GroupCore, bytes]] = {}
        self.accepted: frozenset[int] = frozenset()

    def form(self, members: tuple[int, ...], limit: float) -> Group:
        """Exchange descriptions with ``members``, which are ascending and reachable."""
        context = self._context
        unfinished = self._unfinished.get(members)
        if unfinished is None:
            core = _native.GroupCore(context, list(members))
            # Once only: every description is a datagram to each member.
            unfinished = self._unfinished[members] = core, core.describe()
        core, description = unfinished
        number = self._numbers.get(members, 0)
        key = f"group/{','.join(map(str, members))}/{number}"
        deadline = time.monotonic() + limit
        # A rank that is left alone needs nobody, not even whoever served the store.
        others = [member for member in members if member != context.rank]
        if others:
            self._store.put(f"{key}/{context.rank}", description, limit or None)
        descriptions = []
        for member in members:
            if member == context.rank:
                descriptions.append(description)
                continue
            blob = self._await_member(f"{key}/{member}", member, deadline)
            if blob is None:
                raise Timeout(f"group {members}: rank {member} has not called it in {limit:g} s")
            descriptions.append(blob)
        core.attach(descriptions, context.timeout)
        del self._unfinished[members]
        self._numbers[members] = number + 1
        return Group(context, core)

    def _await_member(self, key: str, member: int, deadline: float) -> bytes | None:
        """What a member put into the store, None if it did not; PeerLost if a rank is lost.

        The store only tells of an owner whose connection ended: not of one that was stopped, nor
        of a third rank because of which the owner may never come.
        """
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return self._store.get(key, min(left, _LOOK_SECONDS), owner=member)
            except Timeout:
                self._require_nobody_lost("group")
                if left <= _LOOK_SECONDS:
                    return None
            except PeerLost:
                # The owner may have left only because of a loss that was not noticed here yet.
                self._require_nobody_lost("group")
                raise

    def _require_nobody_lost(self, during: str) -> None:
        """Raise PeerLost for a loss that ``survivors()`` has not accepted."""
        self._context._require_peer(self._context.rank, during)
        lost = {
            rank: state
            for rank, state in enumerate(self._context._health())
            if state not in ("healthy", "closed") and rank not in self.accepted
        }
        if lost:
            words = ", ".join(f"rank {rank} {state}" for rank, state in lost.items())
            raise PeerLost(
                f"{words}, noticed during {during} on rank {self._context.rank}; "
                "ctx.survivors() gives the group of those left",
                min(lost) if len(lost) == 1 else -1,
            )
