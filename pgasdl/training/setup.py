"""The set-up of an exchange: the plans of its buckets, their memory, and their executions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pgasdl import _native
from pgasdl.buffers import aligned, as_numpy_dtype
from pgasdl.collectives.bound import (
    IN_PLACE,
    ArrayAccess,
    PlanBuffer,
    Tags,
    able,
    bind,
    build,
    options_for,
    require_mapped,
    select,
    staged_by_gpus,
)
from pgasdl.collectives.policy import Choice
from pgasdl.context import Context
from pgasdl.errors import BufferRefusedError, PlanError
from pgasdl.group import Group, Steps
from pgasdl.plans import Case, Plan, spec_of
from pgasdl.plans.pieces import ArrayPlan
from pgasdl.plans.plan import APPLICATION_BUFFERS, Call, is_wire
from pgasdl.segment import Segment
from pgasdl.training.layout import Bucket, Layer

# Bytes for the words in which an owner says why its update failed.
WORDS = 512


@dataclass(frozen=True, slots=True)
class Part:
    """One plan of a bucket."""

    bucket: Bucket
    plan: ArrayPlan
    copied: bool  # it works on a copy on the host

    @property
    def shape(self) -> Plan:
        """Its first phase: all have the same buffers, notifications and updates."""
        return self.plan.first

    def owned(self) -> Iterator[tuple[int, int, int]]:
        """Yield (bucket, offset, count) of what this rank updates."""
        for _, _, step in self.shape.steps():
            if isinstance(step, Call):
                yield self.bucket.index, step.span.offset, step.n


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies on the host of memory on a GPU; plans work on them."""

    gradients: Segment
    weights: Segment | None  # in kind "update"


@dataclass(frozen=True, slots=True)
class ExchangeMemory:
    """The segments of an exchange; gradients and weights may be one."""

    gradients: Segment
    weights: Segment | None
    inbox: Segment | None
    inbox_bytes: int
    segments: list[Segment]
    copies: Copies | None  # if a plan works on them
    last_words: Segment | None  # in kind "update": why an owner ended it, and room to read that


@dataclass(frozen=True, slots=True)
class Setup:
    """An exchange to be set up: its ranks, its kind, and where its memory is."""

    context: Context
    group: Group
    kind: str
    wire: str | None  # dtype in which gradients travel
    device: int | None = None  # the GPU that its memory is on; None: the host

    @property
    def by_host(self) -> bool:
        """Its memory is on a GPU, but peers reach only the host's."""
        return self.device is not None and self.works_on is None

    @property
    def works_on(self) -> int | None:
        """Where the plans work."""
        return self.context.state.place_on(self.device)

    def choices(self, bucket: Bucket, asked: Sequence[str]) -> list[Choice]:
        """Return the plan of a bucket, or those that were asked for by name and can run here."""
        group, kind, nbytes = self.group, self.kind, bucket.nbytes
        where = {"wire": self.wire is not None, "on_gpu": self.device is not None}
        if not asked and (staged := self.staged(bucket)):
            return [staged]
        if not asked:
            policy = self.context.policy
            return [select(policy, group, kind, nbytes, in_place=True, phases=False, **where)]
        case = Case(group.members, kind, nbytes, in_segments=True, **where)
        for plan in asked:
            require_mapped(plan, group)
            if len(asked) > 1 and not able(plan, case):
                raise PlanError(f"plan {plan} is no candidate for kind {kind!r} here")
        return [Choice(plan) for plan in asked]

    def staged(self, bucket: Bucket) -> Choice | None:
        """Return the plan with which GPUs stage a bucket on the host, if they do."""
        if not self.by_host or self.wire is not None:
            return None
        piece = self.context.state.gpu_piece
        return staged_by_gpus(self.group, self.kind, bucket.nbytes, bucket.item, piece)

    def refuse_integers(self, layers: Sequence[Layer]) -> None:
        """Raise BufferRefusedError for integers, unless they are summed as they are."""
        for layer in layers:
            if layer.dtype.kind in "iu" and (self.kind != "sum" or self.wire is not None):
                raise BufferRefusedError(
                    f'layer {layer.index} is {layer.dtype}: integers are summed (kind "sum"), '
                    "neither averaged nor converted"
                )

    def parts(
        self, buckets: Sequence[Bucket], options: dict[str, int], *, rotate_root: bool
    ) -> list[Part]:
        """Build every plan of every bucket."""
        group, wire = self.group, self.wire is not None
        found = []
        for bucket in buckets:
            for choice in bucket.choices:
                here = options_for(group, choice.plan, bucket.dtype, device=self.works_on)
                chosen: dict[str, Any] = {**here, **dict(choice.options), **options}
                if rotate_root:
                    if "root" not in spec_of(choice.plan).options:
                        raise PlanError(f"rotate_root: plan {choice.plan} has no root; tree has")
                    chosen["root"] = (options.get("root", 0) + bucket.index) % group.size
                chosen["wire"] = wire
                copied = self.by_host and choice != self.staged(bucket)
                piece = self.context.state.gpu_piece // bucket.item if copied else 0
                plan = build(group, choice.plan, self.kind, bucket.count, chosen, piece)
                found.append(Part(bucket, plan, copied))
        return found

    def allocate(
        self, buckets: Sequence[Bucket], parts: Sequence[Part], steps: Steps
    ) -> ExchangeMemory:
        """Make the segments. Collective."""
        segments: list[Segment] = []

        def segment(
            nbytes: int, notifications: int, device: int | None, *, workspace: bool = False
        ) -> Segment:
            make = self.context.segments.make
            made = steps(
                lambda: make(
                    self.group, nbytes, notifications, steps.left, device, workspace=workspace
                )
            )
            made.prefault()
            segments.append(made)
            return made

        nbytes = sum(aligned(bucket.nbytes) for bucket in buckets)
        inbox_bytes = sum(
            self._nbytes(part, name)
            for part in parts
            for name in part.shape.buffers
            if name not in APPLICATION_BUFFERS
        )
        flags = sum(self._notifications(part) for part in parts)
        updates = self.kind == "update"
        gradients = segment(nbytes, flags, self.device)
        weights = segment(nbytes, 0, self.device) if updates else None
        if self.kind == "broadcast":
            weights = gradients
        inbox = segment(inbox_bytes, 0, self.works_on, workspace=True) if inbox_bytes else None
        last_words = segment(2 * WORDS, 0, None, workspace=True) if updates else None
        copies = None
        if any(part.copied for part in parts):
            pinned = [segment(nbytes, 0, None, workspace=True) for _ in range(1 + updates)]
            for each in pinned:
                each.pin(self.device)
            inbox_bytes += nbytes * len(pinned)
            copies = Copies(pinned[0], pinned[1] if updates else None)
        return ExchangeMemory(gradients, weights, inbox, inbox_bytes, segments, copies, last_words)

    def bind(self, parts: Sequence[Part], memory: ExchangeMemory) -> None:
        """Give each bucket the executions of its plans."""
        first = position = 0
        for part in parts:
            bucket, shape = part.bucket, part.shape
            places = {}
            worked_on = memory.copies if part.copied and memory.copies else memory
            given = {"data": worked_on.gradients, "weights": worked_on.weights}
            for name in shape.buffers:
                home = given.get(name, memory.inbox)
                assert home is not None
                if home is memory.inbox:
                    places[name] = PlanBuffer(home, position, self._dtype(part, name))
                    position += self._nbytes(part, name)
                else:
                    places[name] = PlanBuffer(home, bucket.at, self._dtype(part, name))
            numbers = _native.Numbering(memory.gradients, first, shape.notifications)
            layers = " ".join(map(str, bucket.layers))
            what = f"the exchange of layer {layers}, bucket {bucket.index}, plan {shape.name}"
            tags = Tags(numbers, first, what)
            access = self._access(bucket, memory) if part.copied else IN_PLACE
            bucket.executions.append(bind(self.group, part.plan, places, tags, access))
            first += self._notifications(part)

    def _access(self, bucket: Bucket, memory: ExchangeMemory) -> ArrayAccess:
        """Return what is copied of a bucket: its gradients to the host, its result back."""
        result = memory.gradients if memory.weights is None else memory.weights
        source, target = (each.address + bucket.at for each in (memory.gradients, result))
        how = _native.BufferAccess.COPIED
        return ArrayAccess(how, source, target, bucket.nbytes, memory.gradients.device_number)

    def _notifications(self, part: Part) -> int:
        """Return the plan's own, and one for each rank."""
        return part.shape.notifications + self.group.size

    def _nbytes(self, part: Part, buffer: str) -> int:
        itemsize = as_numpy_dtype(self._dtype(part, buffer)).itemsize
        return aligned(part.shape.buffers[buffer] * itemsize)

    def _dtype(self, part: Part, buffer: str) -> str:
        if is_wire(buffer) and self.wire is not None:
            return self.wire
        return part.bucket.dtype
