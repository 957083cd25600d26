"""The one way to bind a plan: place the array, choose the plan, build it, bind it to memory.

Calls, handles and exchanges do all four; pairwise collectives bring a plan that is already built.

An array lies, for a plan,

- in place: in segments, and every member knows where in each;
- rebased: where it is; each execution gives the plan its address. No peer touches it, or it is in
  the pool, and peers look its place up in a directory;
- copied: the plan works on a copy in a segment of the collective's own, and the result is copied
  back. An array on a GPU is copied on that GPU where peers reach a GPU, else to the host.

Where peers do not reach a GPU, but map the host's memory, GPUs stage long arrays there themselves
(:func:`staged_by_gpus`): the plan gets at the array where it is, and its inbox is on the host.

The choice depends only on what is the same on all ranks: the policy (compared at init), the world,
the size, and where the arrays lie.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pgasdl import _native
from pgasdl._native import BufferAccess
from pgasdl.buffers import DTYPES, Memory, memory_of
from pgasdl.collectives.policy import Choice, Policy, operation_of
from pgasdl.collectives.state import CollectiveState
from pgasdl.device.names import name_of
from pgasdl.errors import BufferRefusedError, PlanError
from pgasdl.group import Group
from pgasdl.plans import PLANS, Case, Members, spec_of
from pgasdl.plans.pieces import ArrayPlan, build_array, lowered, pieces_of
from pgasdl.segment import Segment
from pgasdl.topology import Topology

Home = tuple[Segment, int]  # and the offset in it
# The kind of plan for each operator of an allreduce; the last three change what reductions do.
KIND_OF_OPERATOR = {"mean": "average", "sum": "sum", "min": "sum", "max": "sum", "prod": "sum"}
_STAGED = "staged"
# Each piece costs a GPU some 200 us besides the time of its bytes.
_PIECES = 8


# --- place


def kind_of(op: str) -> str:
    """Return the kind of plan for an operator of an allreduce."""
    if op not in KIND_OF_OPERATOR:
        known = ", ".join(KIND_OF_OPERATOR)
        raise BufferRefusedError(f"operator {op!r}: an allreduce takes {known}")
    return KIND_OF_OPERATOR[op]


def reduction_of(op: str) -> str:
    """Return the operator by which its plan reduces several arrays."""
    return "sum" if op == "mean" else op


def checked(array: Any, kind: str, reduction: str = "sum") -> Memory:
    """Describe an array; refuse it if collectives of this kind cannot work on it."""
    memory = memory_of(array, device=True)
    integers = memory.native_dtype.startswith("int")  # raises if the core cannot reduce the dtype
    if kind == "average" and integers:
        raise BufferRefusedError("the mean of integers is not an integer: sum, then divide")
    if reduction != "sum" and memory.device is not None:
        raise BufferRefusedError(
            f"{reduction} on {name_of(memory.device)}: a GPU does sums and means"
        )
    return memory


@dataclass(frozen=True, slots=True)
class PlanBuffer:
    """Where a plan's buffer begins: this rank's copy, and each member's (empty: the same place).

    ``directory`` : each execution announces there where the copies begin; None: they never move
    """

    segment: _native.SegmentCore
    offset: int
    dtype: str
    homes: tuple[tuple[_native.SegmentCore, int], ...] = ()
    directory: _native.Directory | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies, as every member of its group knows it.

    ``memory`` : this rank's array
    ``device`` : the GPU that plans work on; None: the host
    ``homes`` : each member's segment and offset; empty: not all lie in segments that all know
    ``told`` : members exchanged the homes; else only a plan may use them that compares what members
    run before it touches a peer's array
    ``pool`` : it may lie in one of these on each rank; empty: it is not looked up in the pool
    """

    memory: Memory
    device: int | None
    homes: tuple[Home, ...] = ()
    told: bool = False
    pool: tuple[Segment, ...] = ()

    @property
    def on_gpu(self) -> bool:
        """The array lies on a GPU."""
        return self.memory.device is not None

    @property
    def by_host(self) -> bool:
        """It lies on a GPU, but plans work on a copy on the host."""
        return self.on_gpu and self.device is None

    @property
    def reached(self) -> bool:
        """Plans that load and store peers' arrays can work on it, or on a copy on its GPU."""
        return bool(self.homes or self.pool) or self.on_gpu

    def access(self, plan: str, group: Group) -> BufferAccess:
        """Return how a plan gets at the array; PlanError: it cannot."""
        spec = spec_of(plan)
        require_mapped(plan, group)
        if spec.works_on == "mapped" and not self.reached:
            raise PlanError(f"plan {plan} needs the array in a segment on every rank")
        if self.homes and (self.told or spec.works_on == "mapped"):
            return BufferAccess.IN_PLACE
        if self.pool and spec.works_on == "mapped":
            return BufferAccess.REBASED
        if not self.on_gpu and works_anywhere(plan, group.members):
            return BufferAccess.REBASED
        return BufferAccess.COPIED

    def data(
        self,
        access: BufferAccess,
        group: Group,
        nbytes: int,
        copy: Home,
        directory: _native.Directory | None = None,
    ) -> PlanBuffer:
        """Return the buffer that a plan works on: ``nbytes`` of the array at most, or its copy."""
        dtype, memory = self.memory.native_dtype, self.memory
        if access == BufferAccess.IN_PLACE:
            return PlanBuffer(*self.homes[group.rank], dtype, self.homes if self.told else ())
        if access == BufferAccess.COPIED:
            return PlanBuffer(*copy, dtype)
        here = _native.local_memory(group.context, memory.address, nbytes, on_gpu(memory))
        return PlanBuffer(here, 0, dtype, directory=directory)


def on_gpu(memory: Memory) -> int:
    """Return the GPU that memory is on, as the core counts: -1 is the host."""
    return -1 if memory.device is None else memory.device


# --- choose


def choose(
    state: CollectiveState,
    group: Group,
    kind: str,
    place: Place,
    plan: str | None,
    *,
    shares: bool = False,
) -> tuple[Choice, BufferAccess]:
    """Return the plan of an array, or the named one, and how it gets at the array.

    With ``shares`` it takes turns with other arrays on one inbox, which not every plan allows.
    """
    nbytes, item, piece = place.memory.nbytes, place.memory.dtype.itemsize, state.gpu_piece
    if plan is not None:
        choice = Choice(plan)
    elif place.by_host and (staged := staged_by_gpus(group, kind, nbytes, item, piece)):
        return staged, BufferAccess.REBASED
    elif place.by_host and shares:  # the copy is for plans that map nothing and send from a segment
        members = replace(group.members, mapped=False, registers=True)
        case = Case(members, kind, nbytes, in_segments=False)
        in_pieces = nbytes > piece  # one is copied while another travels
        choice = automatic(case, shares=True, by_element=in_pieces)
    else:
        choice = select(
            state.policy,
            group,
            kind,
            nbytes,
            in_place=place.reached,
            on_gpu=place.on_gpu,
            shares=shares,
        )
    return choice, place.access(choice.plan, group)


def select(
    policy: Policy,
    group: Group,
    kind: str,
    nbytes: int,
    *,
    in_place: bool,
    on_gpu: bool = False,
    wire: bool = False,
    shares: bool = False,
    phases: bool = True,
) -> Choice:
    """Return the plan for an array by the policy, else by size, mapping and nodes.

    A policy may name a plan with phases also where ``phases`` is False.
    """
    case = Case(group.members, kind, nbytes, in_place, wire, on_gpu)
    operation = operation_of(kind) if policy.rules else ""
    names = (operation,) if in_place else (f"{operation}-array", operation)
    for name in names if operation else ():
        choice = policy.find(name, nbytes)
        # A policy may name a plan that this array cannot use, such as one that needs mapped
        # memory.
        if choice is None or (shares and not PLANS[choice.plan].shares):
            continue
        if able(choice.plan, case):
            return choice
    return automatic(case, shares=shares, phases=phases)


def able(plan: str, case: Case) -> bool:
    """Whether a plan can serve such an array here."""
    spec = PLANS[plan]
    if case.kind not in spec.kinds or (case.wire and not spec.wire):
        return False
    if spec.mapped and not case.members.mapped:
        return False
    if spec.works_on == "private":
        if case.in_segments:
            return not case.on_gpu
        return works_anywhere(plan, case.members)
    return spec.works_on == "segment" or case.in_segments


def works_anywhere(plan: str, members: Members) -> bool:
    """Whether a plan works on arrays wherever they lie, without a copy in a segment."""
    spec = PLANS[plan]
    if spec.works_on != "private":
        return False
    return spec.mapped or not (members.mapped or members.registers)


def automatic(
    case: Case, *, shares: bool = False, phases: bool = True, by_element: bool = False
) -> Choice:
    """Return the first plan of the table that can serve and suits.

    An array that goes in pieces must keep its bits: ``by_element``.
    """
    for name, spec in PLANS.items():
        if (shares and not spec.shares) or (not phases and spec.phases > 1):
            continue
        if by_element and not spec.by_element:
            continue
        if able(name, case) and spec.suits(case):
            return Choice(name, tuple(sorted(spec.tuned(case).items())))
    raise PlanError(f"no plan of the table suits kind {case.kind!r} here: name one")


def staged_by_gpus(group: Group, kind: str, nbytes: int, item: int, piece: int) -> Choice | None:
    """Return the plan with which GPUs stage an array on the host; None: they copy it there.

    Each GPU stores its part in host memory that all of them reach, and loads from there what it
    adds. So no step waits for a processor. With two ranks each byte crosses the bus as often as in
    copies to the host and back; with more ranks up to twice as often.

    An array shorter than ``piece`` bytes is copied.
    """
    reach = group.mapped and group.topology.shared_windows is None  # MPI's is not ours to pin
    if not reach or group.size == 1 or nbytes < piece or kind not in spec_of(_STAGED).kinds:
        return None
    return Choice(_STAGED, (("owners", 1), ("piece", staged_bytes(piece) // item)))


def staged_bytes(piece: int) -> int:
    """Return the bytes of a piece that GPUs stage: whole lines of all dtypes."""
    return -(-_PIECES * piece // 256) * 256


def require_mapped(plan: str, group: Group) -> None:
    """Raise PlanError for a plan that needs mapped memory, where there is none."""
    if spec_of(plan).mapped and not group.mapped:
        raise PlanError(
            f"plan {plan} loads and stores peers' memory, which is not mapped here: use gdraa "
            "or tree"
        )


# --- build


def options_for(
    group: Group, name: str, dtype: str, count: int | None = None, *, device: int | None = None
) -> dict[str, Any]:
    """Return the options that depend on this job: piece length, node size, mapped memory.

    A piece is never longer than ``count``, the elements of an array with an inbox of its own.
    """
    piece = piece_bytes(group.topology, device) // DTYPES[dtype].itemsize
    options: dict[str, Any] = spec_of(name).options_of(group.members, piece)
    if count is not None and "piece" in options:
        options["piece"] = max(1, min(options["piece"], count))
    return options


def piece_bytes(topology: Topology, device: int | None = None) -> int:
    """Return the length of a staged array's piece: it hides a latency and fits in a cache.

    Where ranks share cores, every piece costs turns of the scheduler, so pieces are longer. On a
    GPU a piece costs a launch of a kernel, in which memory moves megabytes.
    """
    if device is not None:
        return 16 << 20
    if topology.oversubscribed:
        return 512 << 10
    # Measured with two ranks on two cores (EPYC), from 1 to 64 MB: staging takes 0.4 to 1.0 of its
    # time with 128 KiB. Memory that is not mapped was not measured with more.
    return 256 << 10 if topology.mapped_on_host else 128 << 10


def build(
    group: Group, plan: str, kind: str, count: int, options: dict[str, Any], copied: int = 0
) -> ArrayPlan:
    """Build this rank's plan of an array, which a GPU copies in pieces of ``copied`` elements."""
    pieces = pieces_of(spec_of(plan), kind, count, copied) if copied else (count,)
    return build_array(plan, group.rank, group.members, pieces, kind=kind, **options)


# --- bind


class ArrayAccess(NamedTuple):
    """How a plan gets at the caller's array: where contribution and result begin, and its GPU.

    0: each run names the addresses. -1: it lies on the host.
    """

    access: BufferAccess
    source: int = 0
    target: int = 0
    nbytes: int = 0
    device: int = -1


IN_PLACE = ArrayAccess(BufferAccess.IN_PLACE)


class Tags(NamedTuple):
    """The mark that tells an execution's notifications from those of others.

    All ranks must agree on the signature. A rank that runs something else on the same notifications
    gets an error at once, with its own signature in it.
    """

    numbering: _native.Numbering
    first_notification: int
    signature: str

    @property
    def digest(self) -> int:
        """The signature in 64 bits."""
        digest = hashlib.blake2b(self.signature.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def bind(
    group: Group,
    plan: ArrayPlan,
    buffers: dict[str, PlanBuffer],
    tags: Tags,
    array: ArrayAccess = IN_PLACE,
    op: str = "sum",
) -> _native.Execution:
    """Bind a plan's buffers and notifications; PlanError: it would leave them."""
    places = [buffers[name] for name in plan.first.buffers]
    return _native.Execution(
        group.context,
        [lowered(phase) for phase in plan.phases],
        [(at.segment, at.offset, at.dtype, list(at.homes), at.directory) for at in places],
        list(group.ranks),
        tags.numbering,
        tags.first_notification,
        tags.digest,
        *array,
        [list(zip(plan.pieces, lanes, strict=True)) for lanes in plan.lanes],
        op,
        tags.signature,
    )
