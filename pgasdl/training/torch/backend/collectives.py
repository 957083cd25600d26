"""The collectives of torch.distributed on flat, contiguous tensors, one after the other.

Sums and means of what the core reduces are plans (``ctx.allreduce``). The others are messages:
every rank sends its part straight to whoever needs it, and what is reduced is reduced in the order
of the ranks, so that all of them and all runs get the same bits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import islice, zip_longest

import torch
from torch import Tensor

from pgasdl.context import Context
from pgasdl.errors import Timeout
from pgasdl.group import Group
from pgasdl.training.torch.backend.message import Bytes, Message
from pgasdl.training.torch.backend.messages import LOOK_SECONDS, Messages
from pgasdl.training.torch.backend.reductions import Reduction

# Up to this many bytes everybody reduces everything: one latency instead of two.
SMALL_BYTES = 64 << 10
# What is reduced from messages comes in pieces of this many bytes, from all ranks together: they
# stay in the caches. Measured with two ranks on two cores: one piece ahead takes 0.6 of the time.
PIECE_BYTES = 1 << 20

# Of a piece: it goes on when the messages are over that it has begun.
Steps = Iterator[list[Message]]


class Operation(IntEnum):
    """What a collective does, for the errors of ranks that do not agree."""

    ALL_REDUCE = 0
    BROADCAST = 1
    REDUCE = 2
    ALL_GATHER = 3
    GATHER = 4
    SCATTER = 5
    REDUCE_SCATTER = 6
    ALL_TO_ALL = 7
    MONITORED_BARRIER = 8


# A tag has 19 bits of a collective's number, 40 of the bytes that all its pieces have, and 4 of
# what it does.
_NUMBER_BITS, _BYTES_BITS, _BITS = 19, 40, 4


def _low(number: int, bits: int) -> int:
    return number & ((1 << bits) - 1)


def _name_of(tag: int) -> str:
    what = Operation(_low(tag, _BITS)).name.lower()
    nbytes = _low(tag >> _BITS, _BYTES_BITS)
    of = f" of {nbytes} bytes" if nbytes else ""
    return f"collective {tag >> (_BITS + _BYTES_BITS)} of the group, {what}{of}"


def bytes_of(tensor: Tensor) -> Bytes:
    """Return the memory of a contiguous tensor."""
    memory: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memory


class Collectives:
    """Collectives of a group; every rank makes the same ones in the same order. Collective.

    Parameters
    ----------
    context : Context
        The context of this rank.
    group : Group
        Its own: no other calls of the program use it.
    timeout : float
        Seconds for making it.
    """

    def __init__(self, context: Context, group: Group, timeout: float) -> None:
        self._context, self._group = context, group
        self._messages = Messages(context, group, timeout, _name_of)
        self._number = 0
        self._stopped: Exception | None = None

    def all_reduce(self, tensor: Tensor, reduction: Reduction, seconds: float) -> None:
        """Replace ``tensor`` by the reduction of all ranks'."""
        deadline = time.monotonic() + seconds
        if reduction.native in ("sum", "mean") and not reduction.prepares:
            self._by_plan(tensor, reduction.native, deadline)
            return
        pieces = _pieces(tensor, PIECE_BYTES)
        if reduction.native in ("sum", "mean"):
            for piece in pieces:
                mine = reduction.prepare(piece)
                self._by_plan(mine, reduction.native, deadline)
                piece.copy_(mine)
            return
        nbytes = tensor.nbytes

        def by_each(piece: Tensor) -> Steps:
            mine = reduction.prepare(piece)
            parts = self._parts(mine)
            yield self._begin_to_all(Operation.ALL_REDUCE, parts, mine, nbytes)
            reduction(parts, piece)

        def in_blocks(piece: Tensor) -> Steps:
            blocks = torch.tensor_split(reduction.prepare(piece), self._group.size)
            results = torch.tensor_split(piece, self._group.size)
            parts = self._parts(blocks[self._group.rank])
            yield self._begin(Operation.ALL_REDUCE, _places(blocks), _places(parts), nbytes)
            own = results[self._group.rank]
            reduction(parts, own)
            yield self._begin_to_all(Operation.ALL_REDUCE, results, own, nbytes)

        self._in_turns(map(by_each if nbytes <= SMALL_BYTES else in_blocks, pieces), deadline)

    def broadcast(self, tensor: Tensor, root: int, seconds: float) -> None:
        """Give every rank the tensor of ``root``."""
        self.scatter(tensor, [tensor] * self._group.size, root, seconds, Operation.BROADCAST)

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction, seconds: float) -> None:
        """Replace the tensor of ``root`` by the reduction of all ranks'."""

        def reduced(piece: Tensor) -> Steps:
            mine = reduction.prepare(piece)
            parts = self._parts(mine) if self._group.rank == root else []
            to = {root: bytes_of(mine)}
            yield self._begin(Operation.REDUCE, to, _places(parts), tensor.nbytes)
            if parts:
                reduction(parts, piece)

        pieces = _pieces(tensor, PIECE_BYTES // self._group.size)
        self._in_turns(map(reduced, pieces), time.monotonic() + seconds)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, seconds: float) -> None:
        """Give every rank all ranks' tensors."""
        self._gather_all(Operation.ALL_GATHER, outputs, tensor, time.monotonic() + seconds)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int, seconds: float) -> None:
        """Give ``root`` all ranks' tensors."""
        to = {root: bytes_of(tensor)}
        self._exchange(Operation.GATHER, to, _places(outputs), time.monotonic() + seconds)

    def scatter(
        self,
        output: Tensor,
        tensors: Sequence[Tensor],
        root: int,
        seconds: float,
        operation: Operation = Operation.SCATTER,
    ) -> None:
        """Give every rank its tensor of those that ``root`` has."""
        to = _places(tensors) if self._group.rank == root else {}
        self._exchange(operation, to, {root: bytes_of(output)}, time.monotonic() + seconds)

    def reduce_scatter(
        self, output: Tensor, tensors: Sequence[Tensor], reduction: Reduction, seconds: float
    ) -> None:
        """Give every rank the reduction of all tensors that are meant for it."""
        nbytes = PIECE_BYTES // self._group.size
        results = _pieces(output, nbytes)
        total = sum(each.nbytes for each in tensors)

        def reduced(pieces: tuple[Tensor | None, ...]) -> Steps:
            given = [None if piece is None else reduction.prepare(piece) for piece in pieces]
            to = {place: bytes_of(piece) for place, piece in enumerate(given) if piece is not None}
            mine = given[self._group.rank]
            parts = [] if mine is None else self._parts(mine)
            yield self._begin(Operation.REDUCE_SCATTER, to, _places(parts), total)
            if parts:
                reduction(parts, next(results))

        # Of tensors that differ in length some have no more pieces.
        pieces = zip_longest(*(_pieces(each, nbytes) for each in tensors))
        self._in_turns(map(reduced, pieces), time.monotonic() + seconds)

    def all_to_all(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], seconds: float
    ) -> None:
        """Give every rank the tensors of all ranks that are meant for it."""
        deadline = time.monotonic() + seconds
        self._exchange(Operation.ALL_TO_ALL, _places(tensors), _places(outputs), deadline)

    def barrier(self, seconds: float) -> None:
        """Wait until every rank is here."""
        deadline = time.monotonic() + seconds
        while not self._tried(lambda left: self._group.barrier(timeout=left), deadline):
            pass

    def monitored_barrier(self, seconds: float, *, wait_all_ranks: bool) -> None:
        """Wait until every rank is here; rank 0 names those that are not in time."""
        deadline = time.monotonic() + seconds
        tag = self._tag(Operation.MONITORED_BARRIER)
        peers = range(1, self._group.size)
        passed = bytes_of(torch.ones(1, dtype=torch.uint8))
        if self._group.rank != 0:
            self._messages.send(0, tag, passed)
            answer = bytes_of(torch.zeros(1, dtype=torch.uint8))
            try:
                self._messages.wait(self._messages.receive(0, tag, answer), seconds)
            except Timeout:
                answer[0] = 0
            if not answer[0]:
                raise Timeout(
                    f"Rank {self._group.rank} successfully reached monitoredBarrier, but received "
                    "errors while waiting for send/recv from rank 0: not all ranks reached it"
                )
            return
        missing = self._absent(tag, deadline, all_of_them=wait_all_ranks)
        passed[0] = not missing
        for peer in peers:
            self._messages.send(peer, tag, passed)
        if missing:
            ranks = "Rank " if len(missing) == 1 else "Ranks "
            raise Timeout(
                f"{ranks}{', '.join(map(str, missing))} failed to pass monitoredBarrier in "
                f"{1e3 * seconds:.0f} ms: Rank 0 timed out in monitoredBarrier"
            )

    def _absent(self, tag: int, deadline: float, *, all_of_them: bool) -> list[int]:
        """Return the places of members that do not come in time; the first, or all of them."""
        token = bytes_of(torch.zeros(1, dtype=torch.uint8))
        peers = range(1, self._group.size)
        received = {peer: self._messages.receive(peer, tag, token.copy()) for peer in peers}
        absent: list[int] = []
        for peer, message in received.items():
            try:
                self._messages.wait(message, max(0.0, deadline - time.monotonic()))
            except Timeout:
                absent.append(peer)
                if not all_of_them:
                    break
        return absent

    def stop(self, error: Exception) -> None:
        """End what is under way, and refuse more, with ``error``."""
        self._stopped = error
        self._messages.fail(error)

    def close(self) -> None:
        """Give up the memory. Idempotent."""
        self._messages.close()

    # --- what they are made of

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        """Return memory for what other ranks have like ``tensor``, with that in its place."""
        parts = list(torch.empty((self._group.size, *tensor.shape), dtype=tensor.dtype).unbind())
        parts[self._group.rank] = tensor
        return parts

    def _in_turns(self, pieces: Iterable[Steps], deadline: float) -> None:
        """Go through the steps of pieces, of which two are under way at a time."""
        turns: deque[tuple[Steps, list[Message]]] = deque()

        def turn() -> None:
            steps, messages = turns.popleft()
            self._finish(messages, deadline)
            turns.extend((steps, following) for following in islice(steps, 1))

        for steps in pieces:
            turns.append((steps, next(steps)))
            while len(turns) > 1:
                turn()
        while turns:
            turn()

    def _tag(self, operation: Operation, nbytes: int = 0) -> int:
        """Return the next tag; ``nbytes`` of what comes in pieces, which tell it nowhere else."""
        number = _low(self._number, _NUMBER_BITS)
        self._number += 1
        return (number << _BYTES_BITS | _low(nbytes, _BYTES_BITS)) << _BITS | operation

    def _gather_all(
        self, operation: Operation, outputs: Sequence[Tensor], tensor: Tensor, deadline: float
    ) -> None:
        self._finish(self._begin_to_all(operation, outputs, tensor), deadline)

    def _begin_to_all(
        self, operation: Operation, outputs: Sequence[Tensor], tensor: Tensor, nbytes: int = 0
    ) -> list[Message]:
        everywhere = dict.fromkeys(range(self._group.size), bytes_of(tensor))
        return self._begin(operation, everywhere, _places(outputs), nbytes)

    def _exchange(
        self,
        operation: Operation,
        outgoing: Mapping[int, Bytes],
        incoming: Mapping[int, Bytes],
        deadline: float,
    ) -> None:
        self._finish(self._begin(operation, outgoing, incoming), deadline)

    def _begin(
        self,
        operation: Operation,
        outgoing: Mapping[int, Bytes],
        incoming: Mapping[int, Bytes],
        nbytes: int = 0,
    ) -> list[Message]:
        """Begin to send to some members, by their places, and to receive from some."""
        tag, me = self._tag(operation, nbytes), self._group.rank
        both = me in outgoing and me in incoming
        if both and incoming[me].ctypes.data != outgoing[me].ctypes.data:
            incoming[me][:] = outgoing[me]
        received = [
            self._messages.receive(peer, tag, memory)
            for peer, memory in incoming.items()
            if peer != me
        ]
        # Not everybody begins with the same member.
        order = sorted(outgoing.keys() - {me}, key=lambda peer: (peer - me) % self._group.size)
        sent = [self._messages.send(peer, tag, outgoing[peer]) for peer in order]
        return [*received, *sent]

    def _finish(self, messages: list[Message], deadline: float) -> None:
        for message in messages:
            self._messages.wait(message, max(0.0, deadline - time.monotonic()))

    def _by_plan(self, tensor: Tensor, op: str, deadline: float) -> None:
        def reduce(left: float) -> None:
            self._context.allreduce(tensor, op, group=self._group, timeout=left)

        while not self._tried(reduce, deadline):
            pass

    def _tried(self, call: Callable[[float], None], deadline: float) -> bool:
        """Make a call that goes on where a Timeout ended it; whether it is over."""
        if self._stopped is not None:
            raise self._stopped
        left = deadline - time.monotonic()
        try:
            call(max(0.0, min(left, LOOK_SECONDS)))
        except Timeout:
            if left <= 0:
                raise
            return False
        return True


def _pieces(tensor: Tensor, nbytes: int) -> Iterator[Tensor]:
    """Cut a contiguous tensor into flat pieces of so many bytes; an empty one into none."""
    if tensor.numel():
        yield from torch.split(tensor.view(-1), max(1, nbytes // tensor.element_size()))


def _places(tensors: Sequence[Tensor]) -> dict[int, Bytes]:
    return {place: bytes_of(tensor) for place, tensor in enumerate(tensors)}
