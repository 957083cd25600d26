"""The workspace of a group's calls: memory for arrays that plans do not work on in place."""

from __future__ import annotations

from pgasdl.buffers import ALIGNMENT
from pgasdl.collectives import pairwise
from pgasdl.collectives.binding import piece_bytes
from pgasdl.collectives.selection import works_anywhere
from pgasdl.group import Group
from pgasdl.plans import PLANS
from pgasdl.segment import SegmentTable


class Workspace:
    """A segment with inboxes, room for a copy, and the rank's entry in the group's directory.

    Making it is collective. The first calls that need its pages touch them; those of a temporary
    would be new in each call.

    Parameters
    ----------
    device : int, optional
        The GPU that it lies on; None: the host.
    copied : int, default 0
        Bytes of an execution whose array is copied from a GPU and back; 0: of others.
    staged : int, default 0
        Bytes of an inbox by which GPUs stage arrays that peers do not reach; it is all there is.
    with_pairwise : bool, default False
        The group makes pairwise collectives, too.

    Attributes
    ----------
    inboxes : dict[str, int]
        Where the inboxes of plans begin that work on arrays wherever they lie. Each has its own:
        peers may still read them when an execution is over.
    copy, copy_bytes : int
        Where the copy begins, and the room for it.
    inbox, inbox_bytes : int
        Where the inbox of all other plans begins, and its length.
    pairwise_inbox : int
        Where the inbox of pairwise collectives begins, if there is one.
    entry : int
        Where the rank's entry in the directory begins.
    """

    def __init__(
        self,
        segments: SegmentTable,
        group: Group,
        device: int | None,
        notifications: int,
        timeout: float,
        copied: int = 0,
        staged: int = 0,
        *,
        with_pairwise: bool = False,
    ) -> None:
        piece = max(piece_bytes(group.topology, device), copied // 4)
        self.inboxes: dict[str, int] = {}
        self.copy = 0
        if staged:
            self.inboxes["staged"] = 0
            self.segment = segments.make(group, staged, notifications, timeout, workspace=True)
            return
        for name, spec in PLANS.items() if device is None and not copied else ():
            private = spec.works_on == "private" and spec.mapped == group.mapped
            if private and works_anywhere(name, group.members):
                self.inboxes[name] = self.copy
                self.copy += spec.inbox_pieces * piece
        # A plan without an inbox, as in a GPU's memory, has no other limit than that of the copy.
        self.inbox_bytes = 4 * piece
        self.copy_bytes = 4 * piece if device is None else 8 * piece
        self.inbox = self.copy + self.copy_bytes
        self.pairwise_inbox = self.inbox + self.inbox_bytes
        self.entry = self.pairwise_inbox + (pairwise.inbox_bytes(group) if with_pairwise else 0)
        nbytes = self.entry + ALIGNMENT
        self.segment = segments.make(group, nbytes, notifications, timeout, device, workspace=True)
