"""GradientExchange: a model's gradients, layer by layer, without a barrier.

CaffeGPI's pattern: each layer's exchange starts as soon as its gradient is there, every call makes
a turn (checks, never waits), and a layer is waited for just before its weights are next used.
Layers may become ready in any order, also in different orders on different ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from pgasdl import _native
from pgasdl.buffers import as_numpy_dtype, native_dtype
from pgasdl.choosing import choices
from pgasdl.collective import Place, bind_phases, options_for
from pgasdl.errors import BufferRefused, PlanError
from pgasdl.layout import Bucket, agree, aligned, lay_out
from pgasdl.plans import build
from pgasdl.plans.plan import APPLICATION_BUFFERS, is_wire
from pgasdl.trial import Trial

if TYPE_CHECKING:
    from pgasdl.context import Context
    from pgasdl.group import Group
    from pgasdl.policy import Choice
    from pgasdl.segment import Segment

Array = npt.NDArray[Any]


@dataclass(slots=True)  # not frozen: block.weights -= ... assigns
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


class GradientExchange:
    """Exchanges the gradients of one model. Collective to make; afterwards no barrier at all.

    Parameters
    ----------
    context : of this rank
    layers : in the model's order: ``(shape, dtype)`` pairs, or arrays, tensors or parameters
    kind : "average": every rank gets the mean gradient, in place; "update": the owner (the tree's
        root, or each owner of a GDRAA block) updates its part of the weights with the mean
        gradient, and the weights travel; "sum": as "average", without the division; "reduce": only
        the root gets the sum; "broadcast": everybody gets the root's weights, no gradients. With
        these two, S-Caffe's training: reduce by layer in the backward pass, broadcast by layer in
        the forward pass, with ``ready`` of all layers first and ``wait`` just before each is used
    plan : name of an algorithm; None: chosen for each bucket by the policy (``PGASDL_POLICY``),
        else by its size: "gdraa-direct" where memory is mapped
    update : for kind "update": called as ``update(block)`` on the owner, elementwise in effect
    bucket_bytes : layers are put together until they have this many bytes; 0: every layer alone
    wire : dtype in which gradients travel ("bfloat16"), None: their own
    group : None: all ranks
    timeout : seconds, of making it; None: the context's default
    candidates : names of plans that are tried in the first iterations, in turn, if ``plan`` is not
        given; the one with which iterations take least time is kept, the same on all ranks
        (swCaffe). Until then they all have their inboxes
    rotate_root : bucket b's root is ``root`` + b (mod size), so that no rank has all the work
    options : of the plan, such as ``root=1``

    Attributes
    ----------
    layers : each layer's :class:`Layer`: where it lies
    gradients : the segment of all gradients; of the weights, in kind "broadcast"
    weights : the segment of all weights, of the same layout, in kinds "update" and "broadcast";
        else None
    inbox_bytes : memory the plan needs on this rank besides the two

    Raises
    ------
    MismatchError   ranks disagree on layers, dtypes, kind, plan or buckets; names them
    BufferRefused   a dtype that is not reduced, or not in this kind
    PlanError       a plan that does not offer the kind or wire, or is not to be had here

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
        rotate_root: bool = False,
        candidates: Sequence[str] = (),
        **options: int,
    ) -> None:
        self.context = context
        self.group = group or context.world
        self.kind = kind
        self._wire = None if wire is None else native_dtype(wire)
        self.layers, self._buckets = lay_out(layers, bucket_bytes)
        asked = [plan] if plan is not None else candidates
        # Of each bucket: its plan, or all that are tried.
        self._chosen = [
            choices(context, self.group, kind, bucket.nbytes, asked, wire=wire is not None)
            for bucket in self._buckets
        ]
        if (kind == "update") != (update is not None):
            raise PlanError('update=function, what the owner does, goes with kind "update" alone')
        self._update = update
        self._refuse_integers()
        self._segments: list[Segment] = []
        settings = (
            f"kind {kind}, plan {self.plan}, buckets of {bucket_bytes} bytes, "
            f"wire {self._wire}, options {sorted(options.items())}"
            f"{', root rotating' if rotate_root else ''}"
        )
        agree(self.group, context.rank, settings, self.layers, timeout)
        self._schedule = _native.LayerSchedule(context, [each.layers for each in self._buckets])
        self._allocate(options, rotate_root, timeout)
        context.exchanges.append(self)
        self._trial = None
        if len(candidates) > 1 and plan is None and self._buckets:
            self._trial = Trial(self, candidates, timeout)

    # --- setting up

    @property
    def plan(self) -> str:
        """The plan of all buckets, or which plans they have, in their order."""
        names = [" or ".join(map(str, each)) for each in self._chosen]
        runs = [(name, len(list(group))) for name, group in groupby(names)]
        if len(runs) == 1:
            return runs[0][0]
        return ", ".join(f"{name} x{number}" for name, number in runs) or "none"

    def _refuse_integers(self) -> None:
        for layer in self.layers:
            if layer.dtype.kind in "iu" and (self.kind != "sum" or self._wire is not None):
                raise BufferRefused(
                    f'layer {layer.index} is {layer.dtype}: integers are summed (kind "sum"), '
                    "neither averaged nor converted"
                )

    def _allocate(self, options: dict[str, int], rotate: bool, timeout: float | None) -> None:
        group = self.group
        nbytes = sum(aligned(bucket.nbytes) for bucket in self._buckets)
        wanted: list[tuple[Bucket, Choice, dict[str, Any]]] = []
        for bucket, each in zip(self._buckets, self._chosen, strict=True):
            for choice in each:
                here = options_for(group, choice.plan, bucket.dtype, wire=self._wire is not None)
                extra = {**here, **dict(choice.options), **options}
                if rotate:
                    extra["root"] = (options.get("root", 0) + bucket.index) % group.size
                wanted.append((bucket, choice, extra))
        shapes = [
            build(choice.plan, group.rank, group.size, bucket.count, kind=self.kind,
                  wire=self._wire is not None, **extra)
            for bucket, choice, extra in wanted
        ]  # fmt: skip
        self.inbox_bytes = sum(
            aligned(count * as_numpy_dtype(self._dtype(name, bucket)).itemsize)
            for (bucket, _, _), shape in zip(wanted, shapes, strict=True)
            for name, count in shape.buffers.items()
            if name not in APPLICATION_BUFFERS
        )
        flags = sum(shape.notifications for shape in shapes)
        self.gradients = self._segment(nbytes, flags, timeout)
        self.weights = self._segment(nbytes, 0, timeout) if self.kind == "update" else None
        if self.kind == "broadcast":
            self.weights = self.gradients
        inbox = self._segment(self.inbox_bytes, 0, timeout) if self.inbox_bytes else None
        first = position = 0
        for (bucket, choice, extra), shape in zip(wanted, shapes, strict=True):
            places = {}
            for name, count in shape.buffers.items():
                dtype = self._dtype(name, bucket)
                home = {"data": self.gradients, "weights": self.weights}.get(name, inbox)
                assert home is not None
                if home is inbox:
                    places[name] = Place(home, position, dtype)
                    position += aligned(count * as_numpy_dtype(dtype).itemsize)
                else:
                    places[name] = Place(home, bucket.at, dtype)
            bucket.bound += bind_phases(
                self.context, group, choice.plan, bucket.count, self.kind, places, self.gradients,
                first, f"bucket {bucket.index}", wire=self._wire is not None, **extra,
            )  # fmt: skip
            first += shape.notifications
        for bucket in self._buckets:
            self._schedule.bind(bucket.index, bucket.bound)

    def _segment(self, nbytes: int, notifications: int, timeout: float | None) -> Segment:
        segment = self.context.segment(
            nbytes, notifications=notifications, group=self.group, timeout=timeout
        )
        segment.prefault()
        self._segments.append(segment)
        return segment

    def _dtype(self, buffer: str, bucket: Bucket) -> str:
        return self._wire if is_wire(buffer) and self._wire is not None else bucket.dtype

    # --- the memory

    def gradient(self, layer: int) -> Array:
        """A layer's gradient: a view of the segment, in the layer's shape."""
        return self._view(self.gradients, layer)

    def weight(self, layer: int) -> Array:
        """A layer's weights (kinds "update", "broadcast"): a view of the segment, in its shape.

        In kind "update" all ranks must begin with the same weights; from then on the exchange keeps
        them the same.
        """
        if self.weights is None:
            raise PlanError('only kinds "update" and "broadcast" keep weights')
        return self._view(self.weights, layer)

    def _view(self, segment: Segment, layer: int) -> Array:
        self._schedule.require(layer)
        of = self.layers[layer]
        return segment.numpy(of.dtype, of.at, of.shape)

    @property
    def timings(self) -> list[Timing]:
        """What each layer cost so far; a copy."""
        return [self.timing(layer) for layer in range(len(self.layers))]

    def timing(self, layer: int) -> Timing:
        """What one layer cost so far; a copy."""
        return Timing(*self._schedule.timing(layer))

    # --- one iteration

    def ready(self, layer: int) -> None:
        """This rank's gradient of ``layer`` is complete: start its exchange, and make a turn.

        Returns at once. The gradient belongs to the exchange until ``wait(layer)`` returns.

        Raises
        ------
        PlanError   no such layer, or it is ready already and was not waited for
        PeerLost, ClosedError
        """
        if self._trial is not None:
            self._trial.before(layer)
        if self._schedule.ready(layer):
            self.context.serve_calls()

    def turn(self) -> None:
        """Advance every exchange as far as it goes without waiting (CaffeGPI's turn)."""
        if self._schedule.turn():
            self.context.serve_calls()

    def wait(self, layer: int, timeout: float | None = None) -> None:
        """Until ``layer``'s mean gradient (or its new weights) is here.

        Call it just before the layer's weights are next used. Returns at once for a layer that was
        not ready since it was last waited for.

        Parameters
        ----------
        timeout : seconds; None: the context's default, 0: one try

        Raises
        ------
        Timeout     names the notifications that are missing; can be called again
        PlanError   no such layer, or others of its bucket are not ready
        PeerLost, MismatchError, ClosedError
        """
        if not self._schedule.wait(layer, timeout):
            self._serve_until(partial(self._schedule.wait, layer), timeout)
        if self._trial is not None:
            self._trial.after()

    def finish(self, timeout: float | None = None) -> None:
        """Until every exchange that was started is complete. No barrier: others may be behind.

        Buckets of which only some layers were ready stay as they are.

        Raises
        ------
        as :meth:`wait`
        """
        deadline = time.monotonic() + (self.context.timeout if timeout is None else timeout)
        for bucket in self._buckets:
            left = None if timeout is None else max(0.0, deadline - time.monotonic())
            if not self._schedule.finish(bucket.index, left):
                self._serve_until(partial(self._schedule.finish, bucket.index), timeout)
        if self._trial is not None:
            self._trial.after()

    def _serve_until(self, wait: Callable[[float], bool], timeout: float | None) -> None:
        """Run updates that are asked for until ``wait`` has nothing more to wait for."""
        deadline = time.monotonic() + (self.context.timeout if timeout is None else timeout)
        while True:
            self.context.serve_calls()
            if wait(max(0.0, deadline - time.monotonic())):
                return

    # --- the owner's part

    def serve(self, call: _native.Call) -> bool:
        """Run the owner's update if ``call`` is of this exchange."""
        number = self._schedule.bucket_of(call)
        if number < 0:
            return False
        assert self.weights is not None and self._update is not None
        bucket = self._buckets[number]
        dtype = as_numpy_dtype(bucket.dtype)
        at = bucket.at + call.offset * dtype.itemsize
        block = Block(
            bucket.index,
            call.offset,
            call.count,
            self.gradients.numpy(dtype, at, call.count),
            self.weights.numpy(dtype, at, call.count),
        )
        try:
            self._update(block)
        except BaseException as error:
            # Half an update can be neither sent nor repeated.
            self._schedule.end(f"update of bucket {bucket.index} raised {error!r}")
            raise
        return True

    def describe(self) -> str:
        """Plan, buckets and the memory they take, for a log."""
        sizes = [bucket.nbytes for bucket in self._buckets]
        own = {id(each): each.nbytes for each in (self.gradients, self.weights) if each is not None}
        segments = sum(own.values())  # in kind "broadcast" both are one
        return (
            f"gradient exchange {self.kind}, plan {self.plan}: {len(self.layers)} layers in "
            f"{len(sizes)} buckets of {min(sizes, default=0)} to {max(sizes, default=0)} "
            f"bytes; segments {segments}, inboxes {self.inbox_bytes} bytes"
        )

    def close(self) -> None:
        """Finish what is under way and give the segments up; idempotent. Views stay valid.

        Raises
        ------
        Timeout, PeerLost   what was under way will not end; the segments are given up all the same
        """
        if self not in self.context.exchanges or self.context.closed:
            return
        try:
            if self._schedule.ended is None:
                self.finish()
        finally:
            self.context.exchanges.remove(self)
            self._schedule.end("it was closed")
            self._schedule.release()
            for bucket in self._buckets:
                bucket.bound.clear()
            for segment in self._segments:
                segment.delete()
