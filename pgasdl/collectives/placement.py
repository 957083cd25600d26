"""Placement: where an array lies, and how a plan gets at it there.

- In place: it lies in segments, and every member knows where in each.
- Rebased: it stays where it is, and each execution tells the plan where that is. No peer touches
  it, or peers look its place up in a directory: the pool, or memory that they can read.
- Copied: the plan works on a copy in a segment of the collective's own, and the result is copied
  back. An array on a GPU is copied on that GPU where peers reach a GPU, else to the host.

Where peers do not reach a GPU, but map the host's memory, GPUs stage long arrays there themselves
(:func:`staged_by_gpus`): the plan gets at the array where it is, and its inbox is on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgasdl._native import BufferAccess, Directory, local_memory
from pgasdl.buffers import Memory
from pgasdl.collectives.binding import PlanBuffer
from pgasdl.collectives.policy import Choice
from pgasdl.collectives.selection import works_anywhere
from pgasdl.collectives.state import CollectiveState, Steps
from pgasdl.errors import PlanError
from pgasdl.group import Group
from pgasdl.plans import spec_of
from pgasdl.plans.algorithms.blocks import ALIGN
from pgasdl.segment import Segment

Home = tuple[Segment, int]  # and the offset in it
_STAGED = "staged"
# Each piece takes GPUs some 200 us more than its bytes do.
_PIECES = 8
# An array of the pool is faster in place from so many bytes on: each execution tells where it is.
_LEAST_IN_POOL = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies, as every member of its group knows it.

    Attributes
    ----------
    memory : Memory
        This rank's array.
    device : int, optional
        The GPU that plans work on; None: the host.
    homes : tuple[Home, ...], default ()
        Each member's segment and offset; empty: not all lie in segments that all know.
    told : bool, default False
        Members told each other the homes. Else only a plan that compares what members run before it
        touches a peer's array may use them.
    pool : tuple[Segment, ...], default ()
        It may lie in one of these on each rank; empty: it is not looked up in the pool.
    readable : bool, default False
        Every member is known to read every other's where it lies.
    """

    memory: Memory
    device: int | None
    homes: tuple[Home, ...] = ()
    told: bool = False
    pool: tuple[Segment, ...] = ()
    readable: bool = False

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
        """Plans that load and store peers' arrays can have it: where it is, or copied on a GPU."""
        return bool(self.homes or self.pool) or self.on_gpu

    def access(self, plan: str, group: Group) -> BufferAccess:
        """Return how a plan gets at the array.

        Raises
        ------
        PlanError
            It cannot.
        """
        spec = spec_of(plan)
        if spec.mapped and not group.mapped:
            raise PlanError(
                f"plan {plan} loads and stores peers' memory, which is not mapped here: use gdraa "
                "or tree"
            )
        if spec.works_on == "mapped" and not self.reached:
            raise PlanError(f"plan {plan} needs the array in a segment on every rank")
        if spec.works_on == "readable" and not (self.told and self.reached):
            why = "this array is on a GPU" if self.on_gpu else group.unreadable
            if why:
                raise PlanError(f"plan {plan} reads peers' arrays where they lie: {why}")
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
        directory: Directory | None = None,
    ) -> PlanBuffer:
        """Return what a plan works on that gets at the array in this way.

        Parameters
        ----------
        nbytes : int
            Length of the array that it works on, at most.
        copy : Home
            Where the copy is, if it works on one.
        directory : Directory, optional
            Where members look up each other's places, if they do.
        """
        dtype, memory = self.memory.native_dtype, self.memory
        if access == BufferAccess.IN_PLACE:
            return PlanBuffer(*self.homes[group.rank], dtype, self.homes if self.told else ())
        if access == BufferAccess.COPIED:
            return PlanBuffer(*copy, dtype)
        device = -1 if memory.device is None else memory.device
        here = local_memory(group.context, memory.address, nbytes, device)
        return PlanBuffer(here, 0, dtype, directory=directory)


def staged_by_gpus(group: Group, kind: str, nbytes: int, item: int, piece: int) -> Choice | None:
    """Return the plan by which GPUs stage an array that plans would else have on the host.

    Each GPU stores its part in memory of the host that all of them reach, and loads there what it
    adds up. So nothing waits for a processor, and each byte crosses the bus as often as in copies
    to the host and back, with two ranks, or up to twice as often.

    Parameters
    ----------
    nbytes, item : int
        Bytes of the array, and of an element.
    piece : int
        Bytes of a piece of an array that is copied to the host; shorter arrays are.
    """
    reach = group.mapped and group.topology.shared_windows is None  # MPI's is not ours to pin
    if not reach or group.size == 1 or nbytes < piece or kind not in spec_of(_STAGED).kinds:
        return None
    return Choice(_STAGED, (("owners", 1), ("piece", staged_bytes(piece) // item)))


def staged_bytes(piece: int) -> int:
    """Return the bytes of a piece that GPUs stage: whole lines of all dtypes."""
    return -(-_PIECES * piece // 256) * 256


def place_of_call(
    state: CollectiveState,
    group: Group,
    memory: Memory,
    outside: set[tuple[int, int, int]],
    *,
    named: bool,
) -> Place:
    """Place the array of a call, whose members do not tell each other where their arrays lie.

    An array in a segment lies there on all ranks. In the pool it may lie at another place on each,
    or elsewhere: where the call chooses the plan, each member reduces a block on the host, so that
    each sees where all lie. On a GPU nobody waits to see it.

    Parameters
    ----------
    outside : set[tuple[int, int, int]]
        The arrays that some rank had outside the pool: segments of the pool, bytes, elements. The
        same on all ranks.
    named : bool
        The caller names the plan.
    """
    if memory.device is not None and state.place_on(memory.device) is None:
        return Place(memory, None)
    segment, offset = state.segments.at(memory)
    readable = memory.device is None and group.unreadable == ""
    if segment is not None and not segment.pooled:
        homes = ((segment, offset),) * group.size if group.mapped else ()
        return Place(memory, memory.device, homes, readable=readable)
    pool = state.segments.pooled(group) if group.mapped else []
    if named or memory.device is not None:
        in_pool = segment in pool and (named or memory.nbytes >= _LEAST_IN_POOL)
    else:
        in_pool = (
            memory.nbytes >= _LEAST_IN_POOL
            and memory.count >= ALIGN * group.size
            and any(part.device == "cpu" for part in pool)
            and (len(pool), memory.nbytes, memory.count) not in outside
        )
    return Place(memory, memory.device, pool=tuple(pool) if in_pool else (), readable=readable)


def agreed_homes(
    state: CollectiveState, group: Group, memory: Memory, steps: Steps, what: str
) -> tuple[Home, ...]:
    """Return where each member's array lies, if all are in segments that all know. Collective.

    ``what`` : what the members are about to make; they all must
    """
    segments = state.segments
    by_host = memory.device is not None and state.place_on(memory.device) is None
    segment, offset = (None, 0) if by_host else segments.at(memory)
    mine = b"" if segment is None else f"{segment.id} {offset}".encode()
    segment, places = steps(lambda: (segment, group.allgather(what, mine, steps.left)))
    if segment is None or not all(places):
        return ()
    ids, offsets = zip(*(map(int, place.split()) for place in places), strict=True)
    if set(ids) == {segment.id}:
        return tuple((segment, at) for at in offsets)

    def agree() -> tuple[Home, ...]:
        found = tuple((segments.of(id_), at) for id_, at in zip(ids, offsets, strict=True))
        known = tuple((home, at) for home, at in found if home is not None)
        verdict = b"known" if len(known) == group.size else b""
        verdicts = group.allgather(f"{what}, places", verdict, steps.left)
        return known if all(verdicts) else ()

    return steps(agree)
