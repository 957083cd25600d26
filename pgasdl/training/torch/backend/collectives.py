"""The collectives of torch.distributed on flat, contiguous tensors, one after the other.

Sums and means of what the core reduces are plans (``ctx.allreduce``). The others are messages:
every rank sends its part straight to whoever needs it, and what is reduced is reduced in the order
of the ranks, so that all of them and all runs get the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from pgasdl.context import Context
from pgasdl.errors import Timeout
from pgasdl.group import Group
from pgasdl.training.torch.backend.message import Bytes
from pgasdl.training.torch.backend.messages import LOOK_SECONDS, Messages
from pgasdl.training.torch.backend.reductions import Reduction

# Up to this many bytes everybody reduces everything: one latency instead of two.
SMALL_BYTES = 64 << 10


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


_BITS = 4


def _name_of(tag: int) -> str:
    what = Operation(tag & ((1 << _BITS) - 1)).name.lower()
    return f"collective {tag >> _BITS} of the group, {what}"


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
        mine = reduction.prepare(tensor)
        if tensor.numel() == 0:
            return
        if reduction.native in ("sum", "mean"):
            self._by_plan(mine, reduction.native, seconds)
            if mine is not tensor:
                tensor.copy_(mine)
            return
        deadline = time.monotonic() + seconds
        if tensor.nbytes <= SMALL_BYTES:
            parts = [torch.empty_like(mine) for _ in range(self._group.size)]
            self._gather_all(Operation.ALL_REDUCE, parts, mine, deadline)
            reduction(parts, tensor)
            return
        blocks = list(torch.tensor_split(mine, self._group.size))
        own = blocks[self._group.rank]
        parts = [torch.empty_like(own) for _ in blocks]
        self._exchange(Operation.ALL_REDUCE, _places(blocks), _places(parts), deadline)
        result = torch.empty_like(own)
        reduction(parts, result)
        results = list(torch.tensor_split(tensor, self._group.size))
        self._gather_all(Operation.ALL_REDUCE, results, result, deadline)

    def broadcast(self, tensor: Tensor, root: int, seconds: float) -> None:
        """Give every rank the tensor of ``root``."""
        self.scatter(tensor, [tensor] * self._group.size, root, seconds, Operation.BROADCAST)

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction, seconds: float) -> None:
        """Replace the tensor of ``root`` by the reduction of all ranks'."""
        mine = reduction.prepare(tensor)
        parts = []
        if self._group.rank == root:
            parts = [torch.empty_like(mine) for _ in range(self._group.size)]
        self.gather(parts, mine, root, seconds, Operation.REDUCE)
        if parts:
            reduction(parts, tensor)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, seconds: float) -> None:
        """Give every rank all ranks' tensors."""
        self._gather_all(Operation.ALL_GATHER, outputs, tensor, time.monotonic() + seconds)

    def gather(
        self,
        outputs: Sequence[Tensor],
        tensor: Tensor,
        root: int,
        seconds: float,
        operation: Operation = Operation.GATHER,
    ) -> None:
        """Give ``root`` all ranks' tensors."""
        to = {root: bytes_of(tensor)}
        self._exchange(operation, to, _places(outputs), time.monotonic() + seconds)

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
        prepared = [reduction.prepare(each) for each in tensors]
        parts = [torch.empty_like(output) for _ in tensors]
        deadline = time.monotonic() + seconds
        self._exchange(Operation.REDUCE_SCATTER, _places(prepared), _places(parts), deadline)
        reduction(parts, output)

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

    def _tag(self, operation: Operation) -> int:
        tag = self._number << _BITS | operation
        self._number += 1
        return tag

    def _gather_all(
        self, operation: Operation, outputs: Sequence[Tensor], tensor: Tensor, deadline: float
    ) -> None:
        memory = bytes_of(tensor)
        everywhere = dict.fromkeys(range(self._group.size), memory)
        self._exchange(operation, everywhere, _places(outputs), deadline)

    def _exchange(
        self,
        operation: Operation,
        outgoing: Mapping[int, Bytes],
        incoming: Mapping[int, Bytes],
        deadline: float,
    ) -> None:
        """Send to some members, by their places, and receive from some."""
        tag, me = self._tag(operation), self._group.rank
        if me in outgoing and me in incoming:
            incoming[me][:] = outgoing[me]
        received = [
            self._messages.receive(peer, tag, memory)
            for peer, memory in incoming.items()
            if peer != me
        ]
        # Not everybody begins with the same member.
        order = sorted(outgoing.keys() - {me}, key=lambda peer: (peer - me) % self._group.size)
        sent = [self._messages.send(peer, tag, outgoing[peer]) for peer in order]
        for message in (*received, *sent):
            self._messages.wait(message, max(0.0, deadline - time.monotonic()))

    def _by_plan(self, tensor: Tensor, op: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds

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


def _places(tensors: Sequence[Tensor]) -> dict[int, Bytes]:
    return {place: bytes_of(tensor) for place, tensor in enumerate(tensors)}
