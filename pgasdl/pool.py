"""A pool: arrays cut from segments that every rank has, without asking the others."""

from __future__ import annotations

import itertools
import math
import operator
import sys
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from pgasdl.buffers import Memory, aligned, as_numpy_dtype
from pgasdl.device.arrays import describe, on_device
from pgasdl.device.names import name_of, ordinal_of
from pgasdl.device.views import DeviceBytes, cupy_view, torch_view
from pgasdl.errors import BufferRefusedError, PoolFullError, SegmentError
from pgasdl.group import Group
from pgasdl.segment import Segment, SegmentTable


class Arena:
    """The free bytes of some memory, which it never touches. For one thread at a time.

    ``free`` has offset and length of each free block, by offset; no two of them touch.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.free = [(0, nbytes)] if nbytes else []
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """Return the offset of a block, whole cache lines; None if there is none so long."""
        wanted = aligned(nbytes)
        for at, (offset, length) in enumerate(self.free):
            if length >= wanted:
                rest = [(offset + wanted, length - wanted)] if length > wanted else []
                self.free[at : at + 1] = rest
                self._taken[offset] = wanted
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Free the block at ``offset``, and merge it with those that it touches."""
        length = self._taken.pop(offset)
        at = bisect(self.free, (offset, 0))
        if at < len(self.free) and self.free[at][0] == offset + length:
            length += self.free.pop(at)[1]
        if at > 0 and sum(self.free[at - 1]) == offset:
            at -= 1
            offset, before = self.free.pop(at)
            length += before
        self.free.insert(at, (offset, length))


class _Lease:
    """An array and its views keep it; when they are gone, its block is free."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment  # its memory stays, also when the context is closed


_Part = tuple[Segment, Arena]


def _where(device: int | None) -> str:
    return "" if device is None else f" on {name_of(device)}"


def _growth(nbytes: int | str, device: int | None) -> str:
    on = "" if device is None else f', device="{name_of(device)}"'
    return f"ctx.pool({nbytes}{on})"


class Pool:
    """The pool of one rank. Any threads may use it.

    The garbage collector may drop an array in any thread, also in one that is allocating. So a
    block that is dropped only joins a queue, without a lock; the next allocation takes it from
    there.
    """

    def __init__(self, segments: SegmentTable, world: Group) -> None:
        self._segments = segments
        self._world = world
        self._lock = threading.Lock()
        self._parts: dict[int | None, list[_Part]] = {}  # by device
        self._dropped: deque[tuple[Arena, int]] = deque()

    def grow(
        self, nbytes: int, device: int | None, timeout: float | None, group: Group | None = None
    ) -> None:
        """Add a segment. Collective; see :meth:`Context.pool`."""
        if operator.index(nbytes) < 0:
            raise SegmentError(f"a pool of {nbytes} bytes")
        members = group or self._world
        segment = self._segments.make(members, aligned(nbytes), 0, timeout, device)
        segment.pooled = True
        with self._lock:
            parts = self._parts.setdefault(device, [])
            parts.append((segment, Arena(segment.nbytes)))
            parts.sort(key=lambda part: part[0].group.size)  # small groups use their own first

    def empty(
        self,
        shape: int | Iterable[int],
        dtype: Any,
        device: int | None,
        group: Group | None = None,
    ) -> Any:
        """Return an array, or a tensor if ``dtype`` is PyTorch's. See :meth:`Context.empty`."""
        sizes = shape if isinstance(shape, Iterable) else (shape,)
        sizes = tuple(map(operator.index, sizes))
        if min(sizes, default=0) < 0:
            raise BufferRefusedError(f"an array of shape {sizes}")
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(dtype, torch.dtype):
            raw = self._bytes(math.prod(sizes) * dtype.itemsize, device, group)
            if isinstance(raw, DeviceBytes):
                return torch_view(raw, dtype, sizes)
            if raw.size == 0:  # torch views no empty bytes as anything else
                return torch.empty(sizes, dtype=dtype)
            return torch.from_numpy(raw).view(dtype).reshape(sizes)
        element = as_numpy_dtype(dtype)
        if element.hasobject or element.itemsize == 0:
            raise BufferRefusedError(
                f"dtype {dtype}: peers can use numbers and records of them only"
            )
        raw = self._bytes(math.prod(sizes) * element.itemsize, device, group)
        if isinstance(raw, DeviceBytes):
            return cupy_view(raw, element, sizes)
        return raw.view(element).reshape(sizes)

    def empty_like(self, array: Any) -> Any:
        """Return an array of the same shape, dtype and device; for a tensor a tensor."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(array, torch.Tensor):
            return self.empty(array.shape, array.dtype, ordinal_of(array.device))
        if not isinstance(array, np.ndarray) and on_device(array):
            found = describe(array, writable=False)
            return self.empty(found.shape, found.dtype, found.ordinal)
        array = np.asarray(array)
        return self.empty(array.shape, array.dtype, None)

    def drop(self, group: Group) -> None:
        """Give up the segments of a group that is deleted. Arrays keep theirs."""
        with self._lock:
            for device, parts in self._parts.items():
                for segment, _ in parts:
                    if segment.group is group:
                        segment.close()
                self._parts[device] = [part for part in parts if part[0].group is not group]

    def describe(self) -> str:
        """Return one line for logs."""
        with self._lock:
            self._free_dropped()
            parts = {device: each for device, each in self._parts.items() if each}
            return "; ".join(itertools.starmap(_state, parts.items())) or "no pool"

    def clear(self) -> None:
        """Give up the segments: the context is closed. Arrays keep theirs."""
        with self._lock:
            self._parts.clear()

    def host_bytes(self, nbytes: int, group: Group) -> npt.NDArray[np.uint8] | None:
        """Cut bytes from a group's pool on the host; None if there is none, or it is full."""
        if not self._parts:
            return None
        with self._lock:
            self._free_dropped()
            found = self._take(nbytes, self._parts_of(None, group)) if nbytes else None
            return None if found is None else _on_host(*found)

    def _bytes(
        self, nbytes: int, device: int | None, group: Group | None
    ) -> npt.NDArray[np.uint8] | DeviceBytes:
        with self._lock:
            self._free_dropped()
            parts = self._parts_of(device, group or self._world)
            if not parts:
                raise PoolFullError(
                    f"there is no pool{_where(device)}: call {_growth('nbytes', device)} on every "
                    "rank first"
                )
            found = self._take(nbytes, parts) if nbytes else (0, 0, None)
            if found is None:
                raise PoolFullError(
                    f"{nbytes} bytes do not fit into the {_state(device, parts)}: drop arrays, or "
                    f"add a segment by {_growth(aligned(nbytes), device)} on every rank"
                )
        where, _, block = found
        if device is not None:
            return DeviceBytes(block, where, nbytes, device)
        return _on_host(*found) if nbytes else np.empty(0, np.uint8)

    def _parts_of(self, device: int | None, group: Group) -> list[_Part]:
        """Return the parts that all members of a group have."""
        return [part for part in self._parts.get(device, ()) if group.within(part[0].group)]

    def _take(self, nbytes: int, parts: list[_Part]) -> tuple[int, int, object] | None:
        """Return address, length and owner of a block; None: no free block is so long."""
        for segment, arena in parts:
            offset = arena.take(nbytes)
            if offset is not None:
                lease = _Lease(segment)
                weakref.finalize(lease, self._dropped.append, (arena, offset)).atexit = False
                return segment.address + offset, nbytes, lease
        return None

    def _free_dropped(self) -> None:
        while self._dropped:
            arena, offset = self._dropped.popleft()
            arena.give_back(offset)


def _on_host(address: int, nbytes: int, owner: object) -> npt.NDArray[np.uint8]:
    return Memory(address, nbytes, np.dtype(np.uint8), (nbytes,), owner).on_host()


def _state(device: int | None, parts: list[_Part]) -> str:
    total = sum(arena.nbytes for _, arena in parts)
    free = [length for _, arena in parts for _, length in arena.free]
    return (
        f"pool of {total} bytes{_where(device)} in {len(parts)} segments: {sum(free)} are free, "
        f"the largest block has {max(free, default=0)}"
    )
