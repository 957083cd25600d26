"""The collectives of torch.distributed on flat, contiguous tensors, one after the other.

All are executions of plans. Sums and means that all ranks get are ``ctx.allreduce``; other sums,
and all that only moves, are pairwise (:mod:`pgasdl.collectives.pairwise`). PyTorch reduces what the
core does not, piece by piece and in the order of the ranks, so that all of them and all runs get
the same bits. A call ends when this rank's part was taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pgasdl import _native
from pgasdl.collectives.allreduce import Allreduces
from pgasdl.collectives.bound import reduction_of
from pgasdl.collectives.pairwise import Pairs, PairwiseCalls
from pgasdl.context import Context
from pgasdl.errors import MismatchError, PgasTimeoutError
from pgasdl.group import Group
from pgasdl.plans.algorithms.pairwise import Blocks
from pgasdl.torch import streams
from pgasdl.torch.backend.message import Bytes
from pgasdl.torch.backend.messages import LOOK_SECONDS, Messages
from pgasdl.torch.backend.reductions import Reduction

# Up to this many bytes everybody reduces everything: one exchange instead of two.
SMALL_BYTES = 64 << 10
# Tensors that PyTorch reduces come in pieces of this many bytes, from all ranks together: they stay
# in the caches.
PIECE_BYTES = 1 << 20
Blocked = tuple[list[int], tuple[int, ...]]  # where blocks lie, and their bytes
# Tags of monitored barriers are below those of programs.
_MONITORED = -(1 << 62)


def bytes_of(tensor: Tensor) -> Bytes:
    """Return the memory of a contiguous tensor."""
    memory: Bytes = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memory


class Collectives:
    """Collectives of a group; every rank makes the same ones in the same order.

    No other calls of the program use ``group``.
    """

    def __init__(self, context: Context, group: Group, messages: Messages) -> None:
        self._context, self._group, self._messages = context, group, messages
        self._rank, self._size = group.rank, group.size
        # Both from the first call on.
        self._pairwise: PairwiseCalls | None = None
        self._allreduces: _native.AllreduceCalls | None = None
        # All-reduces that streams of GPUs make: they are not numbered with the host's calls.
        self._by_streams = Allreduces(context.state, None)
        self._streams: dict[torch.device, Any] = {}
        self._monitored = 0
        self._stopped: Exception | None = None

    def all_reduce(self, tensor: Tensor, reduction: Reduction, seconds: float) -> None:
        """Replace ``tensor`` by the reduction of all ranks'."""
        deadline = time.monotonic() + seconds
        if reduction.native and not reduction.prepares:
            self._by_plan(tensor, reduction, deadline)
            return
        what = f"all_reduce of {tensor.nbytes} bytes"
        for piece in _pieces(tensor, PIECE_BYTES):
            mine = reduction.prepare(piece)
            if reduction.native:
                self._by_plan(mine, reduction, deadline)
                piece.copy_(mine)
            elif tensor.nbytes <= SMALL_BYTES:
                parts = self._parts(mine)
                self._gather_all(what, blocks_of(parts), block_of(mine), parts, deadline)
                reduction(parts, piece)
            else:
                blocks = torch.tensor_split(mine, self._size)
                results = torch.tensor_split(piece, self._size)
                own = results[self._rank]
                parts = self._parts(blocks[self._rank])
                self._pass_on(what, blocks_of(parts), blocks_of(blocks), (parts, mine), deadline)
                reduction(parts, own)
                self._gather_all(what, blocks_of(results), block_of(own), piece, deadline)

    def streams(self, reduction: Reduction, device: torch.device) -> bool:
        """Whether a stream makes an all_reduce of tensors on a GPU."""
        native = reduction.native in ("sum", "mean") and not reduction.prepares
        reached = self._context.state.place_on(device.index) is not None
        return native and self._group.mapped and reached

    def stream(self, device: torch.device) -> Any:
        """Return the stream that makes them, one after the other."""
        if device not in self._streams:
            self._streams[device] = streams.cuda.stream(device)
        return self._streams[device]

    def enqueue_all_reduce(self, tensor: Tensor, reduction: Reduction, seconds: float) -> None:
        """Let the current stream replace a tensor on its GPU by the reduction of all ranks'."""
        if self._stopped is not None:
            raise self._stopped
        self._by_streams.run(tensor, reduction.native or "", self._group, None, seconds)

    def close(self) -> None:
        """Give up the memory of all-reduces on GPUs."""
        self._by_streams.clear()

    def broadcast(self, tensor: Tensor, root: int, seconds: float) -> None:
        """Give every rank the tensor of ``root``."""
        at, n = tensor.data_ptr(), tensor.nbytes

        def pairs() -> Pairs:
            here = self._rank == root
            sends = [n if here and place != root else 0 for place in range(self._size)]
            receives = self._only(root, 0 if here else n)
            blocks = Blocks(tuple(sends), tuple(receives), n, same=True)
            return Pairs(f"broadcast of {n} bytes from rank {root}", "bytes", blocks)

        deadline = time.monotonic() + seconds
        self._run(("broadcast", n, root), pairs, [at, *self._only(root, at)], tensor, deadline)

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction, seconds: float) -> None:
        """Replace the tensor of ``root`` by the reduction of all ranks'."""
        deadline, here = time.monotonic() + seconds, self._rank == root
        what = f"reduce of {tensor.nbytes} bytes to rank {root}"
        if reduction.native and not reduction.prepares:
            at, n = tensor.data_ptr(), tensor.numel()

            def pairs() -> Pairs:
                receives = (n if here else 0,) * self._size
                scale = reduction.scale(self._size)
                blocks = Blocks(tuple(self._only(root, n)), receives, n, reduces=True, scale=scale)
                return Pairs(what, reduction.dtype, blocks, reduction_of(str(reduction.native)))

            places = [*self._only(root, at), at]
            self._run(("reduce", reduction, n, root), pairs, places, tensor, deadline)
            return
        for piece in _pieces(tensor, PIECE_BYTES // self._size):
            mine = reduction.prepare(piece)
            parts = self._parts(mine) if here else []
            self._gather(what, blocks_of(parts), block_of(mine), root, (parts, mine), deadline)
            if here:
                reduction(parts, piece)

    def all_gather(self, outputs: Blocked, given: Blocked, owner: object, seconds: float) -> None:
        """Give every rank all ranks' blocks, whose lengths all know."""
        what = f"all_gather of {sum(outputs[1])} bytes in all"
        self._gather_all(what, outputs, given, owner, time.monotonic() + seconds)

    def gather(
        self, outputs: Blocked, given: Blocked, root: int, owner: object, seconds: float
    ) -> None:
        """Give ``root`` all ranks' blocks."""
        what = f"gather of {given[1][0]} bytes to rank {root}"
        self._gather(what, outputs, given, root, owner, time.monotonic() + seconds)

    def scatter(
        self, output: Blocked, given: Blocked, root: int, owner: object, seconds: float
    ) -> None:
        """Give every rank its block of those that ``root`` has."""
        (at,), (n,) = output

        def pairs() -> Pairs:
            sends = [n if self._rank == root else 0] * self._size
            blocks = Blocks(tuple(sends), tuple(self._only(root, n)), n)
            return Pairs(f"scatter of {n} bytes from rank {root}", "bytes", blocks)

        places = [*(given[0] or [0] * self._size), *self._only(root, at)]
        self._run(("scatter", n, root), pairs, places, owner, time.monotonic() + seconds)

    def reduce_scatter(
        self, output: Tensor, tensors: Sequence[Tensor], reduction: Reduction, seconds: float
    ) -> None:
        """Give every rank the reduction of its blocks: a tensor for each rank, or one for all."""
        deadline = time.monotonic() + seconds
        per_tensor = self._size // len(tensors)
        if reduction.native and not reduction.prepares:
            n, counts = output.numel(), tuple([each.numel() for each in tensors])

            def pairs() -> Pairs:
                sends = tuple([count // per_tensor for count in counts for _ in range(per_tensor)])
                receives, scale = (n,) * self._size, reduction.scale(self._size)
                blocks = Blocks(sends, receives, max(sends), reduces=True, scale=scale)
                what = f"reduce_scatter of {sum(counts) * output.element_size()} bytes"
                return Pairs(what, reduction.dtype, blocks, reduction_of(str(reduction.native)))

            places = [at for each in tensors for at in rows(each, per_tensor)[0]]
            places.append(output.data_ptr())
            key = "reduce_scatter", reduction, counts, n
            self._run(key, pairs, places, (output, tensors), deadline)
            return
        what = f"reduce_scatter of {sum(each.nbytes for each in tensors)} bytes"
        nbytes = PIECE_BYTES // self._size
        results = _pieces(output, nbytes)
        whole = [row for each in tensors for row in torch.tensor_split(each.view(-1), per_tensor)]
        # Where tensors differ in length some have no more pieces.
        for pieces in zip_longest(*(_pieces(each, nbytes) for each in whole)):
            none = output.view(-1)[:0]
            mine = [none if piece is None else reduction.prepare(piece) for piece in pieces]
            parts = self._parts(mine[self._rank])
            self._pass_on(what, blocks_of(parts), blocks_of(mine), (parts, mine), deadline)
            if parts[0].numel():
                reduction(parts, next(results))

    def all_to_all(
        self, outputs: Blocked, given: Blocked, owner: object, seconds: float, *, alike: bool
    ) -> None:
        """Give every rank the blocks of all ranks that are meant for it.

        ``alike`` : all blocks of all ranks have one length; else each rank knows its own only
        """
        deadline, longest = time.monotonic() + seconds, given[1][0]
        what = f"all_to_all of blocks of {longest} bytes" if alike else "all_to_all of any blocks"
        if not alike:
            longest = self._agree(outputs, given, deadline)
        self._pass_on(what, outputs, given, owner, deadline, longest)

    def _agree(self, outputs: Blocked, given: Blocked, deadline: float) -> int:
        """Compare the lengths of all blocks for each other; return the longest."""
        size = self._size
        mine = np.array([*given[1], *outputs[1]])
        lengths = np.empty((size, 2 * size), mine.dtype)
        into = [row.ctypes.data for row in lengths], (mine.nbytes,) * size
        block = [mine.ctypes.data], (mine.nbytes,)
        self._gather_all("lengths of all_to_all", into, block, (lengths, mine), deadline)
        sent, expected = lengths[:, :size], lengths[:, size:].T
        for sender, receiver in np.argwhere(sent != expected):
            raise MismatchError(
                f"all_to_all: rank {sender} has {sent[sender, receiver]} bytes for rank "
                f"{receiver}, which expects {expected[sender, receiver]}"
            )
        return int(sent.max())

    def barrier(self, seconds: float) -> None:
        """Wait until every rank is here."""
        barrier = self._group.barrier
        self._go_on(lambda left: barrier(timeout=left), time.monotonic() + seconds)

    def monitored_barrier(self, seconds: float, *, wait_all_ranks: bool) -> None:
        """Wait until every rank is here; rank 0 names those that are not in time."""
        deadline = time.monotonic() + seconds
        self._monitored += 1
        tag = _MONITORED - self._monitored
        peers = range(1, self._group.size)
        passed = bytes_of(torch.ones(1, dtype=torch.uint8, device="cpu"))
        if self._group.rank != 0:
            self._messages.send(0, tag, passed)
            answer = bytes_of(torch.zeros(1, dtype=torch.uint8, device="cpu"))
            with suppress(PgasTimeoutError):
                self._messages.wait(self._messages.receive(0, tag, answer), seconds)
            if not answer[0]:
                raise PgasTimeoutError(
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
            raise PgasTimeoutError(
                f"{ranks}{', '.join(map(str, missing))} failed to pass monitoredBarrier in "
                f"{1e3 * seconds:.0f} ms: Rank 0 timed out in monitoredBarrier"
            )

    def _absent(self, tag: int, deadline: float, *, all_of_them: bool) -> list[int]:
        """Return the places of members that do not come in time; the first, or all of them."""
        token = bytes_of(torch.zeros(1, dtype=torch.uint8, device="cpu"))
        peers = range(1, self._group.size)
        received = {peer: self._messages.receive(peer, tag, token.copy()) for peer in peers}
        absent: list[int] = []
        for peer, message in received.items():  # all, although the first one tells enough
            try:
                self._messages.wait(message, max(0.0, deadline - time.monotonic()))
            except PgasTimeoutError:
                absent.append(peer)
        return absent if all_of_them else absent[:1]

    def stop(self, error: Exception) -> None:
        """End calls that are under way, and refuse new ones, with ``error``."""
        self._stopped = error

    # --- the parts of which they are made

    def _gather_all(
        self, what: str, outputs: Blocked, given: Blocked, owner: object, deadline: float
    ) -> None:
        """Give every rank all ranks' blocks."""
        (at,), (n,) = given
        into, lengths = outputs

        def pairs() -> Pairs:
            blocks = Blocks((n,) * self._size, lengths, max(lengths), same=True)
            return Pairs(what, "bytes", blocks)

        self._run((what, n, lengths), pairs, [at, *into], owner, deadline)

    def _gather(
        self,
        what: str,
        outputs: Blocked,
        given: Blocked,
        root: int,
        owner: object,
        deadline: float,
    ) -> None:
        """Give ``root`` all ranks' blocks."""
        (at,), (n,) = given

        def pairs() -> Pairs:
            receives = (n if self._rank == root else 0,) * self._size
            return Pairs(what, "bytes", Blocks(tuple(self._only(root, n)), receives, n))

        places = [*self._only(root, at), *(outputs[0] or [0] * self._size)]
        self._run((what, n, root), pairs, places, owner, deadline)

    def _pass_on(
        self,
        what: str,
        outputs: Blocked,
        given: Blocked,
        owner: object,
        deadline: float,
        longest: int = 0,
    ) -> None:
        """Give every rank the blocks that are meant for it.

        ``longest`` : bytes of any rank's longest; 0: this rank knows all
        """
        longest = longest or max(given[1])
        key = what, given[1], outputs[1], longest
        places = [*given[0], *outputs[0]]

        def pairs() -> Pairs:
            return Pairs(what, "bytes", Blocks(given[1], outputs[1], longest))

        self._run(key, pairs, places, owner, deadline)

    def _run(
        self,
        key: Hashable,
        pairs: Callable[[], Pairs],
        places: list[int],
        owner: object,
        deadline: float,
    ) -> None:
        """Make a pairwise collective; ``key`` and ``pairs`` as for :meth:`PairwiseCalls.bound`.

        ``places`` : addresses of the blocks that this rank gives, then of those that it takes; 0:
        there is none
        ``owner`` : keeps the arrays that they are in
        """
        calls = self._pairwise or self._begun(deadline)
        bound = calls.bound(key, pairs)
        owner = owner, bound.apart(places)
        places.append(0)
        try:
            for execution, offset in bound.parts:
                here = [each and each + offset for each in places] if offset else places
                self._go_on(partial(execution.run_at, owner, here), deadline)
        except MismatchError as error:
            raise MismatchError(f"{bound.what}: {error}") from error

    def _begun(self, deadline: float) -> PairwiseCalls:
        """Return the pairwise collectives, once the memory of all collectives is made."""
        while self._pairwise is None:
            self._go_on(self._begin, deadline)
        return self._pairwise

    def _begin(self, left: float) -> None:
        made = self._context._allreduces.begin_pairwise(self._group, left)
        self._pairwise, self._allreduces = made.pairwise, made.calls

    def _by_plan(self, tensor: Tensor, reduction: Reduction, deadline: float) -> None:
        if self._pairwise is None:
            self._begun(deadline)
        calls, op = self._allreduces, reduction.native or ""

        def reduce(left: float) -> None:
            if calls is None or not calls.run(tensor, op, None, left):  # it was not made before
                self._context.allreduce(tensor, op, group=self._group, timeout=left)

        self._go_on(reduce, deadline)

    def _go_on(self, call: Callable[[float], None], deadline: float) -> None:
        """Make a call, which goes on where a timeout ended it, until it is over."""
        while True:
            if self._stopped is not None:
                raise self._stopped
            left = deadline - time.monotonic()
            try:
                call(LOOK_SECONDS if left > LOOK_SECONDS else max(0.0, left))
            except PgasTimeoutError:
                if left <= 0:
                    raise
            else:
                return

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        """Return memory for what other ranks have like ``tensor``, with that in its place."""
        whole = torch.empty((self._size, *tensor.shape), dtype=tensor.dtype, device="cpu")
        parts = list(whole.unbind())
        parts[self._rank] = tensor
        return parts

    def _only(self, place: int, n: int) -> list[int]:
        """Return a number for one member, and 0 for all others."""
        numbers = [0] * self._size
        numbers[place] = n
        return numbers


def rows(tensor: Tensor, number: int) -> Blocked:
    """Cut a contiguous tensor into so many blocks, which it has to have room for."""
    at, n = tensor.data_ptr(), tensor.nbytes // number
    return [at + n * place for place in range(number)], (n,) * number


def cut(tensor: Tensor, counts: Sequence[int], row: int) -> Blocked:
    """Cut a contiguous tensor into blocks of so many rows, of ``row`` bytes each."""
    at = tensor.data_ptr()
    begins = list(accumulate(counts, initial=0))[:-1]
    return [at + row * begin for begin in begins], tuple([row * n for n in counts])


def block_of(tensor: Tensor) -> Blocked:
    """Return where the elements of a contiguous tensor lie, as one block."""
    return [tensor.data_ptr()], (tensor.nbytes,)


def blocks_of(tensors: Sequence[Tensor]) -> Blocked:
    """Return where those of several tensors lie."""
    return [each.data_ptr() for each in tensors], tuple([each.nbytes for each in tensors])


def _pieces(tensor: Tensor, nbytes: int) -> Iterator[Tensor]:
    """Cut a contiguous tensor into flat pieces of so many bytes; an empty one into none."""
    if tensor.numel():
        yield from torch.split(tensor.view(-1), max(1, nbytes // tensor.element_size()))
