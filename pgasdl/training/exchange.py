"""GradientExchange: a model's gradients, layer by layer, without a barrier.

As in CaffeGPI, each layer's exchange starts as soon as its gradient is there. Every call makes a
turn: it checks and never waits. The program waits for a layer just before it next uses the layer's
weights. Layers may become ready in any order, which may differ between ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import numpy.typing as npt

from pgasdl import _native
from pgasdl.buffers import native_dtype
from pgasdl.context import Context
from pgasdl.counters import LayerTimes
from pgasdl.device.names import ordinal_of
from pgasdl.device.streams import stream_handle
from pgasdl.errors import (
    BufferRefusedError,
    ConfigError,
    PeerLostError,
    PgasTimeoutError,
    PlanError,
    UnavailableError,
)
from pgasdl.group import Group, Steps
from pgasdl.plans import EXCHANGES
from pgasdl.plans.plan import ROOTED
from pgasdl.segment import Segment
from pgasdl.training.autotune import Autotune, Tuned, check_candidates
from pgasdl.training.layout import agree, lay_out
from pgasdl.training.owner import Block, Owner, view
from pgasdl.training.setup import Setup


@dataclass(slots=True)
class Timing:
    """The cost of one layer so far, in seconds on this rank.

    ``waiting`` is the sum over all iterations. ``ready``, ``began``, ``ended`` and ``waited`` are
    moments (time.monotonic) of the last one: the gradient was there, the exchange began, this rank
    saw that it had ended, and :meth:`GradientExchange.wait` returned.
    """

    waiting: float = 0.0
    ready: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    waited: float = 0.0


class GradientExchange:
    """Exchanges the gradients of one model. Making it is collective; using it needs no barrier.

    Parameters
    ----------
    context : Context
        The context of this rank.
    layers : Iterable[Any]
        In the model's order: ``(shape, dtype)`` pairs, or arrays, tensors or parameters.
    kind : str, default "average"
        "average": every rank gets the mean gradient, in place; "update": the owner (the tree's
        root, or each owner of a GDRAA block) updates its part of the weights with the mean
        gradient, and the weights travel; "sum": as "average", without the division; "reduce": only
        the root gets the sum; "broadcast": every rank gets the root's weights, no gradients. The
        last two are S-Caffe's training: reduce by layer in the backward pass, then broadcast by
        layer in the forward pass, ``ready`` for all layers first and ``wait`` just before each.
    plan : str, optional
        Name of an algorithm; None: the policy (``PGASDL_POLICY``) chooses for each bucket, else
        its size does: "gdraa-direct" where memory is mapped.
    update : Callable[[Block], None], optional
        For kind "update": the owner calls ``update(block)``, which must act on each element alone.
        On a GPU it enqueues its work on the current stream; the weights travel once that is done.
        If it raises, so does the call in which it ran, and the exchange ends on all ranks: the
        others' waits raise PeerLostError, which names that error.
    bucket_bytes : int, default 0
        Layers share a bucket until it has this many bytes; 0: every layer travels alone.
    wire : dtype, optional
        Dtype in which gradients travel ("bfloat16"); None: their own.
    group : Group, optional
        None: all ranks.
    timeout : float, optional
        Seconds for making it; None: the context's default.
    device : str or torch.device, default "cpu"
        Where gradients and weights lie; "cuda:0": a stream then says when a gradient is complete.
    candidates : Sequence[str], default ()
        Names of plans that the first iterations try in turn, if ``plan`` is not given. Each bucket
        keeps its fastest, the same on all ranks (swCaffe), after five exchanges by each candidate.
        Until then each candidate has an inbox.
    rotate_root : bool, default False
        Bucket b has the root ``root`` + b (mod size): the ranks share its work. For plan "tree".
    **options : int
        Options of the plan, such as ``root=1``.

    Attributes
    ----------
    layers : list[Layer]
        Where each layer lies.
    gradients : Segment
        The segment of all gradients; of the weights, in kind "broadcast".
    weights : Segment or None
        The segment of all weights, of the same layout, in kinds "update" and "broadcast"; else
        None.
    inbox_bytes : int
        Memory that the plans need on this rank besides these two.
    number : int
        Its number among the exchanges that this context has made, from 0 on.

    Raises
    ------
    MismatchError
        Ranks disagree on layers, dtypes, kind, plan or buckets; names the difference.
    ConfigError
        No such kind.
    BufferRefusedError
        A dtype that cannot be reduced, or not in this kind.
    PlanError
        The plan does not offer the kind or wire, or is not available here.

    Notes
    -----
    Gradients and weights lie in segments: if ``p.grad`` is a view (:meth:`gradient`), nothing is
    copied. The order of additions depends on the ranks alone, so all ranks and all runs get the
    same bits. CaffeGPI section 3, MiMatrix section 3.
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
        device: object = "cpu",
        **options: int,
    ) -> None:
        self.context = context
        self.group = group or context.world
        self.kind = kind
        # Errors are raised before the first collective step.
        kinds = (*EXCHANGES, *ROOTED)
        if kind not in kinds:
            raise ConfigError(f"no exchange of kind {kind!r}; there are {', '.join(kinds)}")
        if (kind == "update") != (update is not None):
            raise PlanError('update=function, what the owner does, goes with kind "update" alone')
        limit = context._seconds(timeout)
        self._device = ordinal_of(device)
        if self._device is not None and len(candidates) > 1:
            raise PlanError("candidates are timed by the host: on a GPU name one plan")
        wire_name = None if wire is None else native_dtype(wire)
        setup = Setup(context, self.group, kind, wire_name, self._device)
        self.layers, self._buckets = lay_out(layers, bucket_bytes)
        asked = [plan] if plan is not None else candidates
        # Each bucket gets its plan, or all that are tried.
        for bucket in self._buckets:
            bucket.choices = setup.choices(bucket, asked)
        tried = len(candidates) > 1 and plan is None
        if tried:
            check_candidates(candidates)
        setup.refuse_integers(self.layers)
        parts = setup.parts(self._buckets, options, rotate_root=rotate_root)
        self._owned = [owned for part in parts for owned in part.owned()]
        settings = (
            f"kind {kind}, plan {self.plan}, buckets of {bucket_bytes} bytes, "
            f"wire {setup.wire}, options {sorted(options.items())}"
            f"{', root rotating' if rotate_root else ''}"
            f"{'' if self._device is None else ', on a GPU'}"
            f"{f', in pieces of {context.state.gpu_piece} bytes' if setup.by_host else ''}"
        )
        call = f"the making of a gradient exchange of {len(self.layers)} layers, {settings}"
        with Steps(context.state.unfinished, self.group, call, limit) as steps:
            agree(self.group, context.rank, settings, self.layers, steps)
            self._schedule = _native.LayerSchedule(context, [each.layers for each in self._buckets])
            memory = setup.allocate(self._buckets, parts, steps)
            setup.bind(parts, memory)
            for bucket in self._buckets:
                self._schedule.bind(bucket.index, bucket.executions)
            self._autotune: Autotune | None = None
            if tried and self._buckets:
                tuned = Tuned(self.group, self._schedule, self._buckets)
                self._autotune = Autotune(context, tuned, candidates, steps)
        self.gradients, self.weights = memory.gradients, memory.weights
        self._owner = None if update is None else Owner(setup, self._buckets, memory, update)
        self.inbox_bytes = memory.inbox_bytes
        self._segments = memory.segments
        self.number = next(context.state.numbers)
        context.state.servers.append(self)

    @property
    def plan(self) -> str:
        """The plan of all buckets, or the plans of the buckets in their order."""
        names = [" or ".join(map(str, bucket.choices)) for bucket in self._buckets]
        runs = [(name, len(list(group))) for name, group in groupby(names)]
        if len(runs) == 1:
            return runs[0][0]
        return ", ".join(f"{name} x{number}" for name, number in runs) or "none"

    # --- the memory

    def gradient(self, layer: int) -> Any:
        """Return a layer's gradient: a view of the segment with the layer's shape.

        On a GPU it is a PyTorch tensor, or a CuPy array where PyTorch is not loaded.
        """
        return self._view(self.gradients, layer)

    def weight(self, layer: int) -> Any:
        """Return a layer's weights: a view of the segment with the layer's shape.

        Only kinds "update" and "broadcast" have them. In kind "update" all ranks must begin with
        the same weights; the exchange then keeps them the same.
        """
        if self.weights is None:
            raise PlanError('only kinds "update" and "broadcast" keep weights')
        return self._view(self.weights, layer)

    def _view(self, segment: Segment, layer: int) -> Any:
        self._schedule.require(layer)
        of = self.layers[layer]
        return view(segment, of.dtype, of.at, of.shape)

    @property
    def timings(self) -> list[Timing]:
        """The cost of each layer so far; a copy."""
        return [self.timing(layer) for layer in range(len(self.layers))]

    def timing(self, layer: int) -> Timing:
        """Return the cost of one layer so far; a copy."""
        return Timing(*self._schedule.timing(layer))

    @property
    def times(self) -> list[LayerTimes]:
        """The cost of each layer in all iterations so far, as ``ctx.counters()`` reports it."""
        return [LayerTimes(*self._schedule.total(layer)) for layer in range(len(self.layers))]

    # --- one iteration

    def ready(self, layer: int, *, stream: object = None) -> None:
        """Start the exchange of ``layer``, whose gradient is complete on this rank; make a turn.

        Returns at once. The gradient belongs to the exchange until ``wait(layer)`` returns.

        Parameters
        ----------
        stream : object, optional
            On a GPU: the gradient is complete when this stream has done what was enqueued on it
            before; None: PyTorch's or CuPy's current one.

        Raises
        ------
        PlanError
            No such layer, or it is already ready and was not waited for.
        UnavailableError
            The stream is captured into a CUDA graph; nothing was begun.
        PeerLostError, ClosedError
        """
        if self._autotune is not None:
            self._schedule.require(layer)
            self._autotune.before(self.layers[layer].bucket)
            if self._autotune.settled:
                self._autotune = None
        if self._device is None:
            self._refuse(stream)
            self._schedule.ready(layer)
        else:
            handle = stream_handle(stream, self._device)
            self._schedule.ready_after(layer, handle, self._device)

    @staticmethod
    def _refuse(stream: object) -> None:
        if stream is not None:
            raise BufferRefusedError(
                "a stream orders an exchange on a GPU; this one is on the host"
            )

    def turn(self) -> None:
        """Advance every exchange as far as it goes without waiting (CaffeGPI's turn)."""
        self._schedule.progress()

    def wait(self, layer: int, *, timeout: float | None = None) -> None:
        """Wait until ``layer``'s mean gradient (or its new weights) is here.

        Call it just before the layer's weights are next used. Before the first ``ready`` of all it
        returns at once. On a GPU the call waits, too, and not a stream: the driver stops all other
        work beside a stream that waits for the host.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None: the context's default, 0: one try.

        Raises
        ------
        PgasTimeoutError
            Names the layer and a rank on which it is not ready; the next call continues.
        PlanError
            No such layer; or it was not made ready since the last wait for it, unless a wait was
            interrupted meanwhile; or others of its bucket were not.
        UnavailableError
            An update is due, and the current stream is captured into a CUDA graph: wait again
            outside of the capture.
        PeerLostError, MismatchError, ClosedError
        """
        tuner = self._autotune
        deadline = 0.0 if tuner is None else time.monotonic() + self.context._seconds(timeout)
        try:
            self._schedule.wait(layer, timeout=timeout)
        except PeerLostError as error:
            raise self._explained(error) from None
        except PgasTimeoutError as error:
            why = f"layer {layer}: {error}; has it called ready({layer})?"
            raise PgasTimeoutError(why) from None
        if tuner is not None:
            tuner.after(self.layers[layer].bucket, max(0.0, deadline - time.monotonic()))

    def finish(self, *, timeout: float | None = None) -> None:
        """Wait until every started exchange is complete here. No barrier: peers may be behind.

        Buckets with only some layers ready stay as they are.

        Parameters
        ----------
        timeout : float, optional
            Seconds for all of them; None: the context's default, 0: one try each.

        Raises
        ------
        PgasTimeoutError, PlanError, PeerLostError, MismatchError, ClosedError
            As :meth:`wait`.
        """
        deadline = time.monotonic() + self.context._seconds(timeout)
        for bucket in self._buckets:
            left = max(0.0, deadline - time.monotonic())
            try:
                self._schedule.finish(bucket.index, timeout=left)
            except PeerLostError as error:
                raise self._explained(error) from None
            if self._autotune is not None:
                self._autotune.after(bucket.index, max(0.0, deadline - time.monotonic()))

    # --- the owner's part

    @property
    def blocks(self) -> list[Block]:
        """The blocks that this rank updates in kind "update": views, always the same."""
        return [] if self._owner is None else [self._owner.block(*each) for each in self._owned]

    def serve(self, call: _native.Call) -> bool:
        """Run the owner's update if ``call`` belongs to this exchange."""
        number = self._schedule.bucket_of(call)
        if number < 0:
            return False
        try:
            self._require_no_capture()
        except UnavailableError:
            _native.put_back(self.context, call)
            raise
        self.answer(number, call)
        return True

    def _require_no_capture(self, what: str = "a call that makes an owner's update") -> None:
        """Raise UnavailableError if the current stream is captured into a CUDA graph."""
        if self._device is not None:
            stream = stream_handle(None, self._device)
            _native.refuse_capture(self._device, stream, what)

    def answer(self, number: int, call: _native.Call) -> None:
        """Run the owner's update that ``call`` asks for; then the bucket's weights travel."""
        assert self._owner is not None
        try:
            self._owner.update(number, call)
        except BaseException as error:
            # Half an update must not be sent, and not repeated.
            self._schedule.end(self._owner.last_words(number, error))
            self._schedule.renounce()
            self._schedule.close()
            raise
        self._owner.answer(call)

    def _explained(self, error: PeerLostError) -> PeerLostError:
        """Return the error, with the one that a peer's update raised if that is the cause."""
        return error if self._owner is None else self._owner.explained(error)

    def describe(self) -> str:
        """Describe plan, buckets and their memory, for a log."""
        sizes = [bucket.nbytes for bucket in self._buckets]
        own = {id(each): each.nbytes for each in (self.gradients, self.weights) if each is not None}
        segments = sum(own.values())  # kind "broadcast" has one for both
        return (
            f"gradient exchange {self.kind}, plan {self.plan}: {len(self.layers)} layers in "
            f"{len(sizes)} buckets of {min(sizes, default=0)} to {max(sizes, default=0)} "
            f"bytes; segments {segments}, inboxes {self.inbox_bytes} bytes"
        )

    def close(self, *, finish: bool = True) -> None:
        """Finish the exchanges under way and release the segments. Idempotent. Views stay valid.

        Parameters
        ----------
        finish : bool, default True
            False: abandon the exchanges under way; this rank no longer advances them. A ``with``
            block that an exception leaves does this.

        Raises
        ------
        PgasTimeoutError, PeerLostError
            An exchange under way cannot end; the segments are released all the same.
        """
        if self not in self.context.state.servers or self.context.closed:
            return
        try:
            if finish and self._schedule.ended is None:
                self.finish()
        finally:
            self.context.state.servers.remove(self)
            idle = self._schedule.idle
            self._schedule.end("it was closed")
            self._schedule.close()
            for bucket in self._buckets:
                bucket.executions.clear()
            if self._autotune is not None:
                self._autotune.close(idle=idle)
            # Peers that write by address may still write here: the memory then stays until the end.
            if idle or self.group.mapped:
                for segment in self._segments:
                    segment.delete()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finish=kind is None)
