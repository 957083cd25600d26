"""Two-sided messages between the members of a group, over notified writes.

Every ordered pair of members has a ring of slots in the receiver's copy of one segment. A message
is cut into pieces of at most a slot. The sender writes a piece into the next slot and raises the
slot's notification; the receiver copies it out, and gives two slots back by one notification, the
credit. Where the receiver's memory is not mapped, pieces are sent from a ring of the same size in
the sender's copy, whose places the same credits prove free. Messages of a pair arrive in order.

A member may leave once its last pieces are in the slots. They are received all the same, and no
credit goes back; only messages from and to it that can no longer be complete end with an error.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from pgasdl.context import Context
from pgasdl.errors import (
    ClosedError,
    MismatchError,
    PeerLostError,
    PgasError,
    PgasTimeoutError,
    QueueFullError,
    UnavailableError,
)
from pgasdl.group import Group
from pgasdl.torch.backend.message import SLOTS, Arrival, Bytes, Message, Peer

SLOT_BYTES = 256 << 10
LEAST_SLOT_BYTES = 4 << 10
MEMORY_BYTES = 64 << 20  # of one group's rings on one rank: with many members, slots are smaller
LOOK_SECONDS = 0.1  # between two checks of what no notification reports
SERVE_SECONDS = 1e-3  # that messages are left to threads which may be about to wait for them
SERVED_ROUNDS = 100  # of that, without a new message, until serve() sleeps
_HEADER = struct.Struct("<qQQQ")  # tag, bytes of the message, offset and bytes of the piece
T = TypeVar("T")
_HEADER_BYTES = 64  # the piece begins at a cache line


class Messages:
    """Messages between the members of a group. Any thread may call.

    Making it is collective: no other collective of the group may be under way. ``timeout`` is for
    that; None: the context's default.
    """

    def __init__(
        self,
        context: Context,
        group: Group,
        timeout: float | None = None,
    ) -> None:
        self._context, self._group = context, group
        room = MEMORY_BYTES // (2 * SLOTS * group.size)
        self._slot_bytes = max(LEAST_SLOT_BYTES, min(SLOT_BYTES, room))
        self._slot_bytes = self._slot_bytes // _HEADER_BYTES * _HEADER_BYTES
        self._stride = _HEADER_BYTES + self._slot_bytes
        n_slots = SLOTS * group.size
        self._segment = context.segments.make(
            group, 2 * n_slots * self._stride, 2 * n_slots, timeout, workspace=True
        )
        self._memory: Bytes = self._segment.numpy()
        # Peers' copies, where they can be stored to: then nothing waits on this side.
        self._mapped: list[Bytes | None] = [
            self._segment.numpy(peer=rank) if self._segment.address_of(rank) else None
            for rank in group.ranks
        ]
        self._peers = [Peer() for _ in range(group.size)]
        self._receiving: list[Message] = []  # in the order of the calls
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._looks = 0  # the thread that waits for a notification
        self._moving = False  # what is said of the rings does not hold
        self._n_waiting = 0  # threads in wait()
        self._wanted = threading.Condition(lock)  # serve() sleeps
        self._n_begun = 0
        self._asleep = False  # until that is notified
        self._error: Exception | None = None

    # --- what programs call

    def send(self, peer: int, tag: int, memory: Bytes) -> Message:
        """Begin to send ``memory``; it must not change until the message is done."""
        message = Message(peer, tag, memory)
        with self._changed:
            self._note_begun()
            self._peers[peer].sending.append(message)
            self._move(self._push, peer)
            self._changed.notify_all()
        return message

    def when_over(self, message: Message, call: Callable[[], None]) -> None:
        """Make ``call`` when ``message`` is over: now, or in the thread that notices it."""
        with self._changed:
            if not message.over:
                message.ended = call
                return
        call()

    def receive(self, peer: int | None, tag: int, memory: Bytes) -> Message:
        """Begin to receive the next message with ``tag`` from ``peer``, or from any member."""
        message = Message(peer, tag, memory)
        with self._changed:
            self._note_begun()
            self._receiving.append(message)
            self._move(self._take, message)
            self._changed.notify_all()
        return message

    def wait(self, message: Message, seconds: float) -> None:
        """Wait until ``message`` is done.

        A wait that fails ends a message of which nothing was moved, and the next receive gets what
        comes. Else a caller may wait again; what is left to be sent is copied, so that the memory
        may change. MismatchError: its size differs from the receiver's memory.
        """
        with self._changed:
            self._require_whole()
            self._n_waiting += 1
            try:
                self._wait(message, seconds)
            except BaseException as error:
                self._withdraw(message, error)
                raise
            finally:
                self._n_waiting -= 1
                self._wake()
            if message.error is not None:
                raise message.error

    def _wait(self, message: Message, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not message.over:
            left = deadline - time.monotonic()
            if left <= 0:
                self._look(0.0)
                if message.over:
                    break
                who = "any member" if message.peer is None else self._name(message.peer)
                raise PgasTimeoutError(
                    f"rank {self._context.rank}: the message with tag {message.tag} from or to "
                    f"{who} was not complete within {seconds:g} s: {message.moved} of "
                    f"{message.memory.nbytes} bytes were moved"
                )
            self._look(min(left, LOOK_SECONDS), message)

    def _withdraw(self, message: Message, error: BaseException) -> None:
        queues = [self._receiving, *(each.sending for each in self._peers)]
        queue = next((each for each in queues if message in each), None)
        if queue is None:
            return  # it is over, or comes in
        if not message.moved:
            queue.remove(message)
            why = ClosedError(f"the wait was ended by {type(error).__name__}")
            message.end(error if isinstance(error, PgasError) else why)
        elif not message.memory.flags.owndata:  # else an earlier wait has copied it
            message.memory = message.memory.copy()

    @property
    def busy(self) -> bool:
        """Whether messages are under way that this rank has asked for."""
        return bool(self._receiving) or any(each.sending for each in self._peers) or self._claimed()

    @property
    def failed(self) -> bool:
        """Whether messages were ended, and new ones are refused."""
        return self._error is not None

    def _claimed(self) -> bool:
        return any(a.receiver is not None for each in self._peers for a in each.arrivals)

    def serve(self) -> None:
        """Move messages for which nobody waits, until :meth:`fail`; for a thread of its own."""
        quiet = seen = 0
        with self._changed:
            while self._error is None:
                self._asleep = quiet >= SERVED_ROUNDS
                self._wanted.wait(None if self._asleep else SERVE_SECONDS)
                quiet = quiet + 1 if seen == self._n_begun else 0
                seen, self._asleep = self._n_begun, False
                while self.busy and not self._looks and not self._n_waiting:
                    quiet = 0
                    self._look(LOOK_SECONDS)

    def _note_begun(self) -> None:
        """Let serve() see to a new message, unless messages are refused."""
        self._require_whole()
        self._require_open()
        self._n_begun += 1
        self._wake()

    def _wake(self) -> None:
        """Wake serve() for what is under way, if it sleeps."""
        if self._asleep:
            self._wanted.notify()

    def fail(self, error: Exception) -> None:
        """End every message that is under way, and refuse new ones, with ``error``."""
        with self._changed:
            self._require_whole()
            self._fail(error)

    def close(self) -> None:
        """Give up the memory. Messages under way are abandoned. Idempotent."""
        self.fail(ClosedError("the process group was destroyed"))
        self._segment.close()

    # --- progress; with the lock held

    def _look(self, seconds: float, until: Message | None = None) -> None:
        """Wait for a notification and act on it and others, or let another thread do that."""
        me = threading.get_ident()
        if self._looks:
            self._require_whole(self._looks != me)
            self._changed.wait(seconds)
            return
        self._looks = me
        try:
            raised = self._next(seconds)
            left = [] if raised is not None else self._left()
            if left:  # their last messages had arrived before they left
                raised = self._next(0.0)
            while raised is not None and self._error is None:
                self._move(self._obey, raised)
                raised = None if until is not None and until.over else self._next(0.0)
            self._move(self._give_up, left)
        except Exception as error:
            self._fail(error)
        finally:
            self._looks = 0
            self._changed.notify_all()

    def _next(self, seconds: float) -> int | None:
        """Return a notification that is raised, None if none is; sleep without the lock."""
        if seconds:
            self._changed.release()
        try:
            return self._context.notify_waitsome(self._segment, timeout=seconds)
        except PgasTimeoutError:
            return None
        except PeerLostError:
            if len(self._left()) < len(self._peers) - 1:
                raise
            time.sleep(seconds)  # all others have left: only this rank can still send
            return None
        finally:
            if seconds:
                self._changed.acquire()

    def _obey(self, notification: int) -> None:
        self._context.notify_reset(self._segment, notification)
        credit, place = divmod(notification, SLOTS * len(self._peers))
        peer, slot = divmod(place, SLOTS)
        if credit:
            self._peers[peer].free |= {slot - 1, slot}
            self._push(peer)
        else:
            self._peers[peer].raised.add(slot)
            self._drain(peer)

    def _move(self, act: Callable[[T], None], given: T) -> None:
        """Let ``act`` change the rings; what ends it halfway ends all messages."""
        self._moving = True
        try:
            act(given)
        except PgasError as error:
            self._fail(error)
        except BaseException as error:
            what = f"{type(error).__name__} came while messages of rank {self._context.rank} moved"
            self._fail(ClosedError(f"{what}: destroy the process group, and make another one"))
            raise
        finally:
            self._moving = False

    def _require_whole(self, whole: bool = True) -> None:
        """Refuse a handler of a signal that came into what it would have to wait for."""
        if self._moving or not whole:
            raise UnavailableError(
                f"rank {self._context.rank}: a handler of a signal calls for a message while its "
                "thread moves or awaits others: let it set a flag, and make the call elsewhere"
            )

    def _push(self, peer: int) -> None:
        """Send pieces as long as there are free slots."""
        to = self._peers[peer]
        while to.sending and (slot := to.n_sent % SLOTS) in to.free:
            message = to.sending[0]
            length = min(self._slot_bytes, message.memory.nbytes - message.moved)
            numbers = message.tag, message.memory.nbytes, message.moved, length
            piece = message.memory[message.moved : message.moved + length]
            try:
                self._post(peer, slot, numbers, piece)
            except PeerLostError as error:
                if peer not in self._left():
                    raise
                while to.sending:
                    to.sending.popleft().end(error)
                return
            to.free.discard(slot)
            to.n_sent += 1
            message.moved += length
            if message.moved == message.memory.nbytes:
                to.sending.popleft()
                message.end()

    def _post(self, peer: int, slot: int, numbers: tuple[int, ...], piece: Bytes) -> None:
        """Put a piece into a slot of the receiver's, and raise its notification."""
        rank, me = self._group.ranks[peer], self._group.rank
        there = self._place(me, slot)
        mapped = self._mapped[peer]
        begin = there if mapped is not None else self._place(len(self._peers) + peer, slot)
        memory = self._memory if mapped is None else mapped
        _HEADER.pack_into(memory.data, begin, *numbers)
        at = begin + _HEADER_BYTES
        memory[at : at + len(piece)] = piece
        n_sent = 0 if mapped is not None else _HEADER_BYTES + len(piece)
        source = self._segment[begin : begin + n_sent]
        target = self._segment[there : there + n_sent]
        self._when_there_is_room(
            lambda: self._context.write_notify(source, rank, target, me * SLOTS + slot)
        )

    def _when_there_is_room(self, post: Callable[[], None]) -> None:
        try:
            post()
        except QueueFullError:
            self._context.wait()
            post()

    def _take(self, message: Message) -> None:
        """Give a new receive what has come."""
        places = range(len(self._peers)) if message.peer is None else (message.peer,)
        for place in places:
            self._take_arrived(place, message)
            if message not in self._receiving:
                break
        for place in places:
            self._drain(place)

    def _drain(self, peer: int) -> None:
        """Take the pieces that have come, in their order."""
        of = self._peers[peer]
        while of.n_taken % SLOTS in of.raised:
            slot = of.n_taken % SLOTS
            begin = self._place(peer, slot)
            tag, nbytes, offset, length = _HEADER.unpack_from(self._memory.data, begin)
            if offset == 0 and not self._begin(peer, tag, nbytes):
                return  # the piece stays in its slot, and the sender waits
            arrival = of.arrivals[-1]
            at = begin + _HEADER_BYTES
            arrival.memory[offset : offset + length] = self._memory[at : at + length]
            arrival.moved = offset + length
            if arrival.receiver is not None:
                arrival.receiver.moved = arrival.moved
            of.raised.discard(slot)
            of.n_taken += 1
            if slot % 2:
                self._give_back(peer, slot)
            if arrival.moved == nbytes:
                self._complete(of, arrival)

    def _begin(self, peer: int, tag: int, nbytes: int) -> bool:
        """Find the receive of a message; keep the message if receives from there want others."""
        fitting = [each for each in self._receiving if each.peer in (None, peer)]
        if not fitting:
            return False
        receiver = next((each for each in fitting if each.tag == tag), None)
        if receiver is None:
            self._peers[peer].arrivals.append(Arrival(tag, np.empty(nbytes, np.uint8)))
            return True
        self._receiving.remove(receiver)
        receiver.peer = peer
        memory = receiver.memory
        if memory.nbytes != nbytes:
            receiver.end(self._mismatch(peer, receiver, nbytes))
            memory = np.empty(nbytes, np.uint8)
        self._peers[peer].arrivals.append(Arrival(tag, memory, 0, receiver))
        return True

    def _complete(self, of: Peer, arrival: Arrival) -> None:
        receiver = arrival.receiver
        if receiver is None:
            return  # the message is kept until a receive asks for it
        of.arrivals.remove(arrival)
        if not receiver.over:
            if receiver.memory is not arrival.memory:
                receiver.memory[:] = arrival.memory
            receiver.moved = arrival.moved
            receiver.end()

    def _take_arrived(self, peer: int, receiver: Message) -> None:
        """Give ``receiver`` a message that arrived, or began to, before the receive was called."""
        of = self._peers[peer]
        for arrival in of.arrivals:
            if arrival.receiver is None and arrival.tag == receiver.tag:
                break
        else:
            return
        self._receiving.remove(receiver)
        receiver.peer = peer
        nbytes = arrival.memory.nbytes
        if receiver.memory.nbytes != nbytes:
            receiver.end(self._mismatch(peer, receiver, nbytes))
        arrival.receiver = receiver
        if arrival.moved == nbytes:
            self._complete(of, arrival)

    def _mismatch(self, peer: int, receiver: Message, nbytes: int) -> MismatchError:
        return MismatchError(
            f"rank {self._context.rank} expects {receiver.memory.nbytes} bytes with tag "
            f"{receiver.tag} from {self._name(peer)}, which sends {nbytes}"
        )

    def _give_back(self, peer: int, slot: int) -> None:
        credit = (len(self._peers) + self._group.rank) * SLOTS + slot
        rank = self._group.ranks[peer]
        try:
            self._when_there_is_room(lambda: self._context.notify(rank, self._segment, credit))
        except PeerLostError:
            if peer not in self._left():
                raise

    def _left(self) -> list[int]:
        """Return the places of the members that have left without an error."""
        health = self._context.health()
        return [place for place, rank in enumerate(self._group.ranks) if health[rank] == "closed"]

    def _give_up(self, left: list[int]) -> None:
        """End the messages from and to members that have left; all that they sent was taken."""
        if not left:
            return
        nobody = len(left) == len(self._peers) - 1
        for message in list(self._unfinished()):
            if message.peer in left or (message.peer is None and nobody):
                peer = left[0] if message.peer is None else message.peer
                message.end(
                    PeerLostError(
                        f"{self._name(peer)} has left: the message with tag {message.tag} from or "
                        f"to it will not be complete, {message.moved} of {message.memory.nbytes} "
                        "bytes were moved",
                        self._group.ranks[peer],
                    )
                )
        self._receiving = [each for each in self._receiving if not each.over]
        for peer in left:
            of = self._peers[peer]
            of.sending.clear()
            of.arrivals = [each for each in of.arrivals if each.moved == each.memory.nbytes]

    def _place(self, ring: int, slot: int) -> int:
        """Return where a slot begins; rings of arriving pieces first, by sender."""
        return (ring * SLOTS + slot) * self._stride

    def _name(self, peer: int) -> str:
        return f"rank {self._group.ranks[peer]}"

    def _require_open(self) -> None:
        if self._error is not None:
            raise self._error

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        for message in list(self._unfinished()):
            message.end(self._error)
        self._receiving.clear()
        for each in self._peers:
            each.sending.clear()
            each.arrivals.clear()
        self._changed.notify_all()
        self._wanted.notify_all()

    def _unfinished(self) -> Iterator[Message]:
        yield from self._receiving
        for each in self._peers:
            yield from each.sending
            yield from (a.receiver for a in each.arrivals if a.receiver is not None)
