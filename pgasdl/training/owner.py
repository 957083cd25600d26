"""Kind "update": the blocks that this rank owns, and their updates."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pgasdl import _native
from pgasdl.buffers import as_numpy_dtype
from pgasdl.device.streams import stream_handle
from pgasdl.errors import PeerLostError, PgasError, PlanError
from pgasdl.segment import Segment
from pgasdl.training.layout import Bucket
from pgasdl.training.setup import WORDS, ExchangeMemory, Setup

# Renders an exception of the program's function: short, even if its own repr fails.
_REPR = reprlib.Repr()
_REPR.maxother = 300
# Seconds to wait for the explanation of an error, which must not hold it up.
_PATIENCE = 1.0


@dataclass(slots=True)  # not frozen: block.weights -= ... assigns
class Block:
    """A part of one bucket that its owner updates: elements [offset, offset + count).

    Attributes
    ----------
    bucket : int
        Number of the bucket; equal to the layer's number where layers travel alone.
    offset, count : int
        First element, and number of elements.
    gradient : ndarray
        The mean gradient of these elements, flat. On a GPU it is a PyTorch tensor, or a CuPy array
        where PyTorch is not loaded.
    weights : ndarray
        The weights of these elements, flat, likewise; the update changes them in place.
    """

    bucket: int
    offset: int
    count: int
    gradient: Any
    weights: Any


def view(segment: Segment, dtype: Any, at: int, shape: int | tuple[int, ...]) -> Any:
    """View a part of a segment, with NumPy, PyTorch or CuPy."""
    if segment.device_number < 0:
        return segment.numpy(dtype, at, shape)
    torch = sys.modules.get("torch")
    if torch is None:
        return segment.cupy(dtype, at, shape)
    return segment.torch(getattr(torch, dtype.name), at, shape)


class Owner:
    """Makes the updates of this rank's blocks, by the program's function ``update``."""

    def __init__(
        self,
        setup: Setup,
        buckets: Sequence[Bucket],
        memory: ExchangeMemory,
        update: Callable[[Block], None],
    ) -> None:
        assert memory.weights is not None
        assert memory.last_words is not None
        self._words = memory.last_words
        self._context, self._device = setup.context, setup.device
        self._buckets, self._memory, self._update = buckets, memory, update
        self._weights = memory.weights

    def block(self, bucket: int, offset: int, count: int) -> Block:
        """Return a block: views of its gradient and its weights."""
        at, dtype = self._place(bucket, offset), as_numpy_dtype(self._buckets[bucket].dtype)
        parts = (view(each, dtype, at, count) for each in (self._memory.gradients, self._weights))
        return Block(bucket, offset, count, *parts)

    def _place(self, bucket: int, offset: int) -> int:
        """Return where an element of a bucket lies in the segments, in bytes."""
        return self._buckets[bucket].at + offset * self._buckets[bucket].item

    def update(self, bucket: int, call: _native.Call) -> None:
        """Run the update that ``call`` asks for; on a GPU the current stream may do it later."""
        block = self.block(bucket, call.offset, call.count)
        copies = self._memory.copies
        if copies is None:
            self._change(block)
            return
        # The plan works on the host: the GPU gets its result, and the host the new weights.
        at, nbytes = self._place(bucket, call.offset), call.count * self._buckets[bucket].item
        self._copy(self._memory.gradients, copies.gradients, at, nbytes)
        self._change(block)
        assert copies.weights is not None
        self._copy(copies.weights, self._weights, at, nbytes)

    def _change(self, block: Block) -> None:
        weights = block.weights
        self._update(block)
        if block.weights is not weights:
            raise PlanError(
                "update(block) has put another array in the place of block.weights: change the "
                "weights in place, as by block.weights -= ... or block.weights[...] = ..."
            )

    def _copy(self, to: Segment, source: Segment, at: int, nbytes: int) -> None:
        assert self._device is not None
        stream = stream_handle(None, self._device)
        _native.device_copy(to.address + at, source.address + at, nbytes, self._device, stream)

    def answer(self, call: _native.Call) -> None:
        """Let the weights travel, on a GPU once the current stream has changed them."""
        if self._device is None or self._memory.copies is not None:
            _native.answer(self._context, call)
        else:
            _native.answer(self._context, call, stream_handle(None, self._device), self._device)

    def last_words(self, bucket: int, error: BaseException) -> str:
        """Record, where peers can read it too, that an update raised this; it ends the exchange."""
        why = f"update of bucket {bucket} raised {_REPR.repr(error)}"
        words = why.encode(errors="replace")[:WORDS]
        self._words.numpy()[: len(words)] = list(words)
        return why

    def explained(self, error: PeerLostError) -> PeerLostError:
        """Return the error with the last words of the lost rank, if it left any."""
        context, room = self._context, self._words
        with suppress(PgasError):
            context.read(room[WORDS:], error.rank, room[:WORDS], timeout=_PATIENCE)
            context.wait(timeout=_PATIENCE)
            words = bytes(room.numpy()[WORDS:]).rstrip(b"\0").decode(errors="ignore")
            if words:
                return PeerLostError(f"{error}: {words}", error.rank)
        return error
