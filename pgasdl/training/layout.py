"""The layout of a model's layers in buckets, and its comparison between ranks."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pgasdl import _native
from pgasdl.buffers import aligned, as_numpy_dtype, native_dtype
from pgasdl.collectives.policy import Choice
from pgasdl.errors import BufferRefusedError, MismatchError
from pgasdl.group import Group, Steps

# Fingerprints of layers in one message of a group.
_PRINTS = 200


@dataclass(frozen=True, slots=True)
class Layer:
    """One tensor of the model: ``offset`` in elements from its bucket's beginning.

    ``at`` counts bytes from the beginning of the exchange's segments.
    """

    index: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    bucket: int
    offset: int
    at: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(slots=True)
class Bucket:
    """Layers that travel together."""

    index: int
    dtype: str
    at: int  # bytes into the segments
    count: int = 0  # elements
    layers: list[int] = field(default_factory=list)
    # Its plan, or all that are tried; and the execution of each.
    choices: list[Choice] = field(default_factory=list)
    executions: list[_native.Execution] = field(default_factory=list)

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return as_numpy_dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes from the begin of the first layer to the end of the last."""
        return self.count * self.item


def lay_out(given: Iterable[Any], bucket_bytes: int) -> tuple[list[Layer], list[Bucket]]:
    """Give every layer its place. Neighbours of one dtype share a bucket until it is full."""
    layers: list[Layer] = []
    buckets: list[Bucket] = []
    for index, each in enumerate(given):
        shape, dtype = _shape_and_dtype(index, each)
        name = native_dtype(dtype)
        last = buckets[-1] if buckets else None
        if last is None or last.dtype != name or last.nbytes >= bucket_bytes:
            at = 0 if last is None else last.at + aligned(last.nbytes)
            last = Bucket(len(buckets), name, at)
            buckets.append(last)
        offset = aligned(last.nbytes) // last.item
        layer = Layer(index, shape, dtype, last.index, offset, last.at + offset * last.item)
        layers.append(layer)
        last.layers.append(index)
        last.count = offset + layer.count
    return layers, buckets


def _shape_and_dtype(index: int, given: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if isinstance(given, Sequence) and len(given) == 2 and not hasattr(given, "dtype"):
        shape, dtype = given
    elif hasattr(given, "shape") and hasattr(given, "dtype"):
        shape, dtype = given.shape, given.dtype
    else:
        raise BufferRefusedError(
            f"layer {index} is {given!r}: give a (shape, dtype) pair, an array, a tensor or a "
            "parameter"
        )
    dims = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
    if any(n < 0 for n in dims):
        raise BufferRefusedError(f"layer {index} has the shape {dims}")
    return dims, as_numpy_dtype(dtype)


def agree(group: Group, rank: int, settings: str, layers: Sequence[Layer], steps: Steps) -> None:
    """Compare settings and layers with every member's. Collective.

    The MismatchError, on every member, names the first one that differs from member 0.
    """
    prints = [zlib.crc32(str(layer).encode()) for layer in layers]
    everything = zlib.crc32(struct.pack(f"<{len(prints)}I", *prints))
    mine = f"{len(layers)} layers, {settings}"
    header = struct.pack("<I", everything) + mine.encode()[:1000]

    def gathered(what: str, blob: bytes) -> list[bytes]:
        return steps(lambda: group.allgather(what, blob, steps.left))

    headers = gathered("gradient exchange", header)
    if len(set(headers)) == 1:
        return
    texts = [header[4:].decode() for header in headers]
    _compare(group, rank, texts, "")
    # Every member saw the difference, so every member takes part in the search.
    for first in range(0, len(layers), _PRINTS):
        part = struct.pack(f"<{len(prints[first : first + _PRINTS])}I", *prints[first:][:_PRINTS])
        parts = gathered("gradient exchange, layers", part)
        for number in range(len(part) // 4):
            if len({each[4 * number :][:4] for each in parts}) > 1:
                text = str(layers[first + number])[:512].encode()
                shown = gathered("gradient exchange, layer", text)
                _compare(group, rank, [t.decode() for t in shown], f"layer {first + number} is ")


def _compare(group: Group, rank: int, texts: Sequence[str], what: str) -> None:
    for other, text in zip(group.ranks, texts, strict=True):
        if text != texts[0]:
            raise MismatchError(
                f"gradient exchange on rank {rank}: {what}{texts[0]} on rank {group.ranks[0]}, but "
                f"{text} on rank {other}: layers, dtypes and settings must be the same on all ranks"
            )
