"""GradientExchange: a model's gradients, layer by layer, without a barrier.

CaffeGPI's pattern: each layer's exchange starts as soon as its gradient is there, every call makes a
turn (checks, never waits), and a layer is waited for just before its weights are next used. Layers
may become ready in any order, also in different orders on different ranks.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pgasdl import _native
from pgasdl.buffers import as_numpy_dtype, native_dtype
from pgasdl.collective import Place, bind_phases, options_for
from pgasdl.errors import BufferRefused, MismatchError, PlanError
from pgasdl.plans import PLANS, build

if TYPE_CHECKING:
    from pgasdl.context import Context
    from pgasdl.group import Group

Array = npt.NDArray[Any]

# Layers begin at cache lines; two ranks' writes never share one.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Layer:
    """One tensor of the model: where it lies in its bucket, in elements."""

    index: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    bucket: int
    offset: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Block:
    """What an owner updates: elements [offset, offset + count) of one bucket.

    Attributes
    ----------
    bucket : number of the bucket, equal to the layer's where layers travel alone
    offset, count : elements of the bucket
    gradient : the mean gradient of these elements, flat
    weights : the weights of these elements, flat: to be updated in place
    """

    bucket: int
    offset: int
    count: int
    gradient: Array
    weights: Array


@dataclass(slots=True)
class Timing:
    """What one layer cost in the iterations so far, in seconds of this rank.

    ``ready``, ``began``, ``ended`` and ``waited`` are moments (time.monotonic) of the last
    iteration: the gradient was there, the exchange began, it was seen to have ended, and
    :meth:`GradientExchange.wait` returned.
    """

    waiting: float = 0.0
    ready: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    waited: float = 0.0


@dataclass(slots=True)
class _Bucket:
    index: int
    dtype: str
    count: int
    layers: list[int]
    base: int  # bytes into the gradient segment
    bound: list[_native.BoundPlan] = field(default_factory=list)
    phase: int = 0
    missing: set[int] = field(default_factory=set)
    under_way: bool = False

    @property
    def plan(self) -> _native.BoundPlan:
        return self.bound[self.phase]


class GradientExchange:
    """Exchanges the gradients of one model. Collective to make; afterwards no barrier at all.

    Parameters
    ----------
    context : of this rank
    layers : in the model's order: ``(shape, dtype)`` pairs, or arrays, tensors or parameters
    kind : "average": every rank gets the mean gradient, in place; "update": the owner (the tree's
        root, or each owner of a GDRAA block) updates its part of the weights with the mean
        gradient, and the weights travel
    plan : name of an algorithm; None: "gdraa-direct" where memory is mapped, else "gdraa"
    update : for kind "update": called as ``update(block)`` on the owner, elementwise in effect
    bucket_bytes : layers are put together until they have this many bytes; 0: every layer alone
    wire : dtype in which gradients travel ("bfloat16"), None: their own
    group : None: all ranks
    options : of the plan, such as ``root=1``

    Raises
    ------
    MismatchError   ranks disagree on layers, dtypes, kind, plan or buckets; names them
    BufferRefused   a dtype that is not reduced
    PlanError       a plan that does not offer the kind or wire

    Notes
    -----
    Gradients and weights live in segments: let ``p.grad`` be a view (:meth:`gradient`), and nothing
    is copied. The order of additions depends on the ranks alone, so that all ranks and all runs get
    the same bits. CaffeGPI section 3, MiMatrix section 3.
    """

    def __init__(
        self,
        context: Context,
        layers: Iterable[Any],
        *,
        kind: str = "average",
        plan: str | None = None,
        update: Callable[[Block], None] | None = None,
        bucket_bytes: int = 0,
        wire: npt.DTypeLike | None = None,
        group: Group | None = None,
        timeout: float | None = None,
        **options: int,
    ) -> None:
        self.context = context
        self.group = group or context.world
        self.kind = kind
        self.plan = plan or ("gdraa-direct" if context.mapped and wire is None else "gdraa")
        if self.plan not in PLANS:
            raise PlanError(f"no plan named {self.plan!r}; there are {', '.join(sorted(PLANS))}")
        if kind == "update" and update is None:
            raise PlanError('kind "update" needs update=function: what the owner does')
        self._update = update
        self._wire = None if wire is None else native_dtype(wire)
        self.layers, self._buckets = _layout(layers, bucket_bytes)
        self.timings = [Timing() for _ in self.layers]
        self._agree(bucket_bytes, options, timeout)
        self._allocate(options, timeout)
        context.exchanges.append(self)

    # --- setting up

    def _agree(self, bucket_bytes: int, options: dict[str, int], timeout: float | None) -> None:
        lines = [f"{layer.dtype} {layer.shape}" for layer in self.layers]
        what = f"{self.kind} {self.plan} {bucket_bytes} {self._wire} {sorted(options.items())}"
        total = sum(layer.count for layer in self.layers)
        mine = (
            f"{len(lines)} layers, {total} elements, {what}, "
            f"digest {zlib.crc32(chr(10).join(lines).encode()):08x}"
        )
        everybody = self.group.allgather("gradient exchange", mine.encode(), timeout)
        for rank, theirs in zip(self.group.ranks, everybody, strict=True):
            if theirs != mine.encode():
                raise MismatchError(
                    f"gradient exchange: rank {self.context.rank} has {mine}; rank {rank} has "
                    f"{theirs.decode()}: layers, dtypes and settings must be the same on all ranks"
                )

    def _allocate(self, options: dict[str, int], timeout: float | None) -> None:
        group = self.group
        nbytes = notifications = 0
        shapes = []
        private: list[int] = []
        for bucket in self._buckets:
            bucket.base = nbytes
            item = as_numpy_dtype(bucket.dtype).itemsize
            nbytes += -(-bucket.count * item // ALIGNMENT) * ALIGNMENT
            shape = build(
                self.plan, group.rank, group.size, bucket.count, kind=self.kind,
                wire=self._wire is not None, **self._options(bucket, options),
            )  # fmt: skip
            shapes.append(shape)
            notifications += shape.notifications
            private.append(
                sum(
                    -(-count * self._item(name, bucket) // ALIGNMENT) * ALIGNMENT
                    for name, count in shape.buffers.items()
                    if name not in ("data", "weights")
                )
            )
        self.gradients = self.context.segment(
            nbytes, notifications=notifications, group=group, timeout=timeout
        )
        self.weights = None
        if self.kind == "update":
            self.weights = self.context.segment(
                nbytes, notifications=0, group=group, timeout=timeout
            )
        self.inbox_bytes = sum(private)
        inbox = None
        if self.inbox_bytes:
            inbox = self.context.segment(
                self.inbox_bytes, notifications=0, group=group, timeout=timeout
            )
        first = position = 0
        for bucket, shape in zip(self._buckets, shapes, strict=True):
            places = {"data": Place(self.gradients, bucket.base, bucket.dtype)}
            if self.weights is not None:
                places["weights"] = Place(self.weights, bucket.base, bucket.dtype)
            for name, count in shape.buffers.items():
                if name in places:
                    continue
                assert inbox is not None
                wired = name.startswith("wire_") and self._wire is not None
                dtype = self._wire if wired and self._wire is not None else bucket.dtype
                places[name] = Place(inbox, position, dtype)
                position += -(-count * self._item(name, bucket) // ALIGNMENT) * ALIGNMENT
            bucket.bound = bind_phases(
                self.context, group, self.plan, bucket.count, self.kind, places, self.gradients,
                first, f"bucket {bucket.index}", wire=self._wire is not None,
                **self._options(bucket, options),
            )  # fmt: skip
            first += shape.notifications
            bucket.missing = set(bucket.layers)

    def _options(self, bucket: _Bucket, options: dict[str, int]) -> dict[str, int]:
        return {**options_for(self.plan, bucket.dtype), **options}

    def _item(self, buffer: str, bucket: _Bucket) -> int:
        wired = buffer.startswith("wire_") and self._wire is not None
        return as_numpy_dtype(self._wire if wired else bucket.dtype).itemsize

    # --- the memory

    def gradient(self, layer: int) -> Array:
        """A layer's gradient: a view of the segment, in the layer's shape."""
        return self._view(self.gradients, layer)

    def weight(self, layer: int) -> Array:
        """A layer's weights (kind "update"): a view of the segment, in the layer's shape."""
        if self.weights is None:
            raise PlanError('only kind "update" keeps weights')
        return self._view(self.weights, layer)

    def _view(self, segment: Any, layer: int) -> Array:
        of = self.layers[layer]
        offset = self._buckets[of.bucket].base + of.offset * of.dtype.itemsize
        view: Array = segment.numpy(of.dtype, offset, of.shape)
        return view

    # --- one iteration

    def ready(self, layer: int) -> None:
        """This rank's gradient of ``layer`` is complete: start its exchange, and make a turn.

        Returns at once. The gradient belongs to the exchange until ``wait(layer)`` returns.

        Raises
        ------
        PlanError   the layer is ready already and was not waited for
        """
        self.timings[layer].ready = time.monotonic()
        bucket = self._buckets[self.layers[layer].bucket]
        if bucket.under_way or layer not in bucket.missing:
            raise PlanError(
                f"layer {layer} is ready twice in one iteration: wait({layer}) before its "
                "gradient is computed again"
            )
        bucket.missing.discard(layer)
        if not bucket.missing:
            bucket.plan.start()
            bucket.under_way = True
        self.turn()

    def turn(self) -> None:
        """Advance every exchange as far as it goes without waiting (CaffeGPI's turn)."""
        _native.turn(self.context)
        self.context.serve_calls()

    def wait(self, layer: int, timeout: float | None = None) -> None:
        """Until ``layer``'s mean gradient (or its new weights) is here.

        Call it just before the layer's weights are next used. Returns at once for a layer that was
        not ready since it was last waited for.

        Raises
        ------
        Timeout    names the notifications that are missing; can be called again
        PeerLost, MismatchError
        """
        bucket = self._buckets[self.layers[layer].bucket]
        began = time.monotonic()
        if bucket.under_way:
            self._finish(bucket, timeout)
        elif bucket.missing and len(bucket.missing) < len(bucket.layers):
            raise PlanError(
                f"layer {layer} shares bucket {bucket.index} with layers "
                f"{sorted(bucket.missing)}, which are not ready"
            )
        timing = self.timings[layer]
        timing.waited = time.monotonic()
        timing.waiting += timing.waited - began

    def _finish(self, bucket: _Bucket, timeout: float | None) -> None:
        while not bucket.plan.wait(timeout):
            self.context.serve_calls()
        times = bucket.plan.times
        for layer in bucket.layers:
            self.timings[layer].began, self.timings[layer].ended = times
        bucket.under_way = False
        bucket.missing = set(bucket.layers)
        bucket.phase = (bucket.phase + 1) % len(bucket.bound)

    def finish(self, timeout: float | None = None) -> None:
        """Until every exchange that was started is complete. No barrier: others may be behind.

        Buckets of which only some layers were ready stay as they are.
        """
        for bucket in self._buckets:
            if bucket.under_way:
                self._finish(bucket, timeout)

    # --- the owner's part

    def serve(self, call: _native.Call) -> bool:
        """Run the owner's update if ``call`` is of this exchange."""
        for bucket in self._buckets:
            if bucket.under_way and call.is_of(bucket.plan):
                assert self.weights is not None and self._update is not None
                dtype = as_numpy_dtype(bucket.dtype)
                at = bucket.base + call.offset * dtype.itemsize
                self._update(
                    Block(
                        bucket.index,
                        call.offset,
                        call.count,
                        self.gradients.numpy(dtype, at, call.count),
                        self.weights.numpy(dtype, at, call.count),
                    )
                )
                return True
        return False

    def describe(self) -> str:
        """Plan, buckets and the memory they take, for a log."""
        sizes = [bucket.count * as_numpy_dtype(bucket.dtype).itemsize for bucket in self._buckets]
        return (
            f"gradient exchange {self.kind}, plan {self.plan}: {len(self.layers)} layers in "
            f"{len(self._buckets)} buckets of {min(sizes, default=0)} to {max(sizes, default=0)} "
            f"bytes; segments {self.gradients.nbytes * (2 if self.weights is not None else 1)}, "
            f"inboxes {self.inbox_bytes} bytes"
        )

    def close(self) -> None:
        """Give the exchange's segments up; idempotent."""
        if self in self.context.exchanges:
            self.context.exchanges.remove(self)
            self.finish()
            self.gradients.delete()
            if self.weights is not None:
                self.weights.delete()


def _layout(layers: Iterable[Any], bucket_bytes: int) -> tuple[list[Layer], list[_Bucket]]:
    found: list[Layer] = []
    buckets: list[_Bucket] = []
    for index, given in enumerate(layers):
        shape, dtype = _shape_and_dtype(given)
        name = native_dtype(dtype)
        count = math.prod(shape)
        last = buckets[-1] if buckets else None
        full = last is None or last.dtype != name or last.count * dtype.itemsize >= bucket_bytes
        if last is None or full:
            last = _Bucket(len(buckets), name, 0, [], 0)
            buckets.append(last)
        align = ALIGNMENT // dtype.itemsize
        offset = -(-last.count // align) * align
        found.append(Layer(index, shape, dtype, last.index, offset))
        last.layers.append(index)
        last.count = offset + count
    return found, buckets


def _shape_and_dtype(given: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if isinstance(given, Sequence) and len(given) == 2 and not hasattr(given, "dtype"):
        shape, dtype = given
    elif hasattr(given, "shape") and hasattr(given, "dtype"):
        shape, dtype = given.shape, given.dtype
    else:
        raise BufferRefused(
            f"a layer is a (shape, dtype) pair, an array, a tensor or a parameter, not {given!r}"
        )
    dims = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
    if any(n < 0 for n in dims):
        raise BufferRefused(f"a layer of shape {dims}")
    return dims, as_numpy_dtype(dtype)
