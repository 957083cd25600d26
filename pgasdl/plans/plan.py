"""A collective as data: the steps of each rank. ``validation`` has the rules of a well-formed plan.

A plan says what one rank does in one execution of one collective. A native executor runs it on
any transport; ``check`` proves it over all interleavings. Spans count elements, not bytes, so a
plan serves every dtype.

Buffers are symmetric: each rank holds all of ``Plan.buffers``. Binding says where they lie. Only
those in ``Plan.private`` may be longer on one rank than on another: no peer touches them.

=============  ===================================================================================
``data``       ``count`` elements, reduced in place; the application's, between executions
``weights``    ``count`` elements, kind ``update`` only; the application's, between executions
``result``     where plans that leave ``data`` alone put the result; the application's, too
``inbox``      where peers put or find contributions; the plan's own
``wire_out``   like ``data``, in the wire's dtype: what is sent, and where results arrive
``wire_in``    like ``inbox``, in the wire's dtype
=============  ===================================================================================

A plan numbers its notifications 0..n-1, on the board of the rank that waits for them. In every
execution each is raised once and waited for once. Its value is the execution's generation, so no
flag is taken for that of another execution, and none is ever reset.

A credit is a notification that a receiver raises when a place is free, in the execution that uses
the place; the sender waits for it. Traffic without an answer needs credits. An exchange does not:
its second half proves that the places of its first half are free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, cycle, pairwise, takewhile
from typing import Any

from pgasdl.errors import PlanError

# The kinds of results; ``results.py`` defines each, element by element. An exchange takes something
# from every rank and leaves the same on all; the other kinds are parts of it, or stand alone.
EXCHANGES = ("average", "sum", "update")
ROOTED = ("reduce", "broadcast")
KINDS = (*EXCHANGES, *ROOTED, "reduce-scatter", "all-gather", "all-to-all")
HOOKS = frozenset({"update"})
# Where the application's ``data`` may lie, for a plan to work on it: see PlanSpec.
PLACES = ("segment", "mapped", "private")
APPLICATION_BUFFERS = ("data", "weights", "result")
# The number of ranks in each group of neighbours: one number for all groups; or one for each group,
# repeated from the first on. The last group may be short.
Sizes = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """The begin of elements: ``buffer[offset:]``, here or, with ``rank``, in a mapped peer."""

    buffer: str
    offset: int
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Put:
    """Write ``n`` own elements from ``src`` to ``dst`` at ``peer``, then raise ``notify`` there.

    ``n = 0`` only raises the flag. ``dst.rank`` is None: ``peer`` says whose copy it is. The source
    may be read until a Flush, or an answer that the flag caused, proves that it was sent. The flag
    follows every earlier Put of its lane to the peer; nothing orders Puts of different lanes.
    """

    src: Span
    n: int
    peer: int
    dst: Span
    notify: int | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Hold this lane until ``notification`` carries the execution's generation.

    ``peer`` is the rank that owes it; error messages name it.
    """

    notification: int
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class Reduce:
    """``dsts[j][i] = scale * (srcs[0][i] + srcs[1][i] + ...)``, in that order, in one pass.

    One source with scale 1 is a copy, or a cast where the buffers' dtypes differ. A destination
    is one of the sources exactly, or overlaps none. Remote spans need a mapped plan.
    """

    dsts: tuple[Span, ...]
    srcs: tuple[Span, ...]
    n: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Copy:
    """``dst[i * dst_step + j] = src[i * src_step + j]`` for ``rows`` rows i of ``n`` elements j.

    It casts where the buffers' dtypes differ. Neither rows of ``dst`` nor those of ``src`` overlap,
    and they are in two buffers. It works on the host only.
    """

    dst: Span
    src: Span
    n: int
    rows: int = 1
    dst_step: int = 0
    src_step: int = 0

    @property
    def total(self) -> int:
        """Elements of all rows."""
        return self.n * self.rows

    def row(self, number: int) -> tuple[Span, Span]:
        """Return the place that a row goes to, and the place that it comes from."""
        to, of = number * self.dst_step, number * self.src_step
        return (
            Span(self.dst.buffer, self.dst.offset + to, self.dst.rank),
            Span(self.src.buffer, self.src.offset + of, self.src.rank),
        )


@dataclass(frozen=True, slots=True)
class Call:
    """Run the application's ``hook`` on ``n`` elements from ``span``.

    ``update`` reads the gradient in ``data`` and updates the same elements of ``weights``.
    """

    hook: str
    span: Span
    n: int


@dataclass(frozen=True, slots=True)
class Flush:
    """Hold this lane until the sources of all its Puts have been read (local completion)."""


Step = Put | Wait | Reduce | Copy | Call | Flush


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of ``rank`` of ``size`` in one execution, which ends when every lane has ended.

    Attributes
    ----------
    name : str
        Name of the algorithm.
    rank, size : int
        The rank of this plan, and the number of ranks.
    count : int
        Elements of ``data``.
    lanes : tuple[tuple[Step, ...], ...]
        Steps of each lane, in order. Lanes run concurrently; none holds up another.
    buffers : dict[str, int]
        Elements of each buffer, the same on every rank, unless it is private.
    notifications : int
        Upper limit of the ids, the same on every rank.
    mapped : bool
        It loads from and stores to peers' memory; the transport must map it.
    private : frozenset[str]
        Buffers that no peer touches, with a length of their own on each rank.
    """

    name: str
    rank: int
    size: int
    count: int
    lanes: tuple[tuple[Step, ...], ...]
    buffers: dict[str, int] = field(hash=False)
    notifications: int
    mapped: bool = False
    private: frozenset[str] = frozenset()

    def steps(self) -> Iterator[tuple[int, int, Step]]:
        """Yield ``(lane, index in the lane, step)`` in order."""
        for lane, steps in enumerate(self.lanes):
            for index, step in enumerate(steps):
                yield lane, index, step

    def where(self, lane: int, index: int) -> str:
        """Name a step, for messages."""
        step = describe(self.lanes[lane][index])
        return f"plan {self.name}, rank {self.rank}, lane {lane}, step {index} ({step})"


@lru_cache(1024)
def begins(size: int, sizes: Sizes) -> tuple[int, ...]:
    """Return where each group of ``size`` ranks begins; and, behind the last one, ``size``.

    >>> begins(7, 3), begins(7, (2, 4, 1))
    ((0, 3, 6, 7), (0, 2, 6, 7))
    """
    each = sizes if isinstance(sizes, tuple) else (sizes,)
    if min(each, default=0) < 1:
        raise PlanError(f"groups of {sizes} ranks: each has one at least")
    return (*takewhile(lambda begin: begin < size, accumulate(cycle(each), initial=0)), size)


@lru_cache(1024)
def lengths(size: int, sizes: Sizes) -> tuple[int, ...]:
    """Return how many ranks each group of ``size`` ranks has."""
    return tuple(end - begin for begin, end in pairwise(begins(size, sizes)))


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks that run a plan, as the plan may know them; the same on all of them.

    Attributes
    ----------
    size : int
        Number of ranks.
    node_size : Sizes, default 1
        Ranks of each node, neighbours in the order of ranks; 1: one each, or nodes are not known.
    mapped : bool, default False
        Each rank maps the segments of all others.
    mapped_on_node : bool, default False
        Each maps those of its node.
    registers : bool, default False
        Some are sent to only from memory of segments.
    oversubscribed : bool, default False
        Some node has more ranks than cores.
    supernode_size : Sizes, default 1
        Ranks under one switch, neighbours in the order of ranks; 1: unknown.
    order : tuple[int, ...], default ()
        Ranks in the order in which plans number them, so that those of a node are neighbours; ():
        they are.
    """

    size: int
    node_size: Sizes = 1
    mapped: bool = False
    mapped_on_node: bool = False
    registers: bool = False
    oversubscribed: bool = False
    supernode_size: Sizes = 1
    order: tuple[int, ...] = ()

    @property
    def several_nodes(self) -> bool:
        """Whether they are on several nodes, of which one at least has several ranks."""
        return 1 < self.nodes < self.size

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(lengths(self.size, self.node_size))

    @property
    def group_size(self) -> Sizes:
        """Ranks that are nearer to each other than to others, of a node or a supernode; 0: none."""
        sizes = self.node_size if self.several_nodes else self.supernode_size
        return sizes if 1 < len(lengths(self.size, sizes)) < self.size else 0


@dataclass(frozen=True, slots=True)
class Case:
    """An array for which a plan is chosen.

    Attributes
    ----------
    members : Members
        The ranks.
    kind : str
        One of :data:`KINDS`.
    nbytes : int
        Its length on each rank.
    in_segments : bool
        It lies in a segment on every rank.
    wire : bool, default False
        It travels in another dtype.
    on_gpu : bool, default False
        It lies on a GPU.
    """

    members: Members
    kind: str
    nbytes: int
    in_segments: bool
    wire: bool = False
    on_gpu: bool = False


def never(case: Case) -> bool:
    """Return False: the plan is used only where it is named."""
    del case
    return False


def always(case: Case) -> bool:
    """Return True: the plan is used wherever it can be, if no row before it is."""
    del case
    return True


def no_inbox(size: int, count: int) -> int:
    """Return 0: the plan has no inbox."""
    del size, count
    return 0


def no_options(members: Members, piece: int) -> dict[str, Any]:
    """Return no options: the plan's defaults serve all ranks."""
    del members, piece
    return {}


def not_tuned(case: Case) -> dict[str, Any]:
    """Return no options: the plan's defaults serve all arrays."""
    del case
    return {}


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """One row of the table of plans.

    Attributes
    ----------
    name : str
        Name of the plan.
    build : Callable[..., Plan]
        ``build(rank, size, count, *, kind, wire, **options) -> Plan``, pure.
    summary : str
        One line for ``describe``.
    kinds : tuple[str, ...]
        The kinds that it offers, of :data:`KINDS`.
    wire : bool
        It can send in another dtype, in the kinds :data:`EXCHANGES`.
    mapped : bool
        It needs mapped memory of the peers.
    works_on : str
        Where ``data`` lies: "segment": in a segment, or copied into one; "mapped": in segments that
        all ranks map, where it loads and stores the peers'; "private": anywhere, no peer touches
        it.
    suits : Callable[[Case], bool], default never
        Whether to take it where nobody names a plan: the first usable row that suits is taken.
    options : tuple[str, ...]
        Names of the options of ``build``, which are integers.
    several : tuple[str, ...]
        Those of them that may be a tuple of integers, such as groups of unlike sizes.
    phases : int
        Executions alternate between this many plans, built with the option ``phase``. All have the
        same buffers and notifications at the same places. All ranks take part in each execution;
        where several plans with phases share a numbering, as in ``ctx.allreduce``, they take turns.
    shares : bool
        Arrays of other counts, and other such plans, may take turns on one inbox, as in
        ``ctx.allreduce``: at the end of an execution a rank knows that all have read their slots.
    by_element : bool
        The order of an element's additions does not depend on its place in the array: an array
        that is exchanged in pieces has the bits of the whole.
    options_of : Callable[[Members, int], dict[str, Any]], default no_options
        ``options_of(members, piece)``: the options that depend on the ranks, and on the elements of
        a piece that hides a latency and fits in a cache.
    tuned : Callable[[Case], dict[str, Any]], default not_tuned
        ``tuned(case)``: the options where nobody names a plan, such as chunks, or groups by nodes.
    inbox_pieces : int
        In ``ctx.allreduce`` all arrays share an inbox of so many pieces; of "private" plans alone.
    longest : Callable[[int, int, int], int], optional
        ``longest(piece, size, notifications)``: elements of one execution with so many
        notifications, where ``piece`` is its option; None: it does not work in pieces.
    inbox : Callable[..., int], optional
        ``inbox(size, count, **options)``: elements of ``inbox`` in the kinds average and sum, for
        count > 0 and several ranks, the same on all; None: the plan must be built to know it.
    """

    name: str
    build: Callable[..., Plan]
    summary: str
    kinds: tuple[str, ...] = EXCHANGES
    wire: bool = True
    mapped: bool = False
    works_on: str = "segment"
    suits: Callable[[Case], bool] = never
    options: tuple[str, ...] = ()
    several: tuple[str, ...] = ()
    phases: int = 1
    shares: bool = False
    by_element: bool = False
    options_of: Callable[[Members, int], dict[str, Any]] = no_options
    tuned: Callable[[Case], dict[str, Any]] = not_tuned
    inbox_pieces: int = 0
    longest: Callable[[int, int, int], int] | None = None
    inbox: Callable[..., int] | None = None


def is_wire(buffer: str) -> bool:
    """Whether ``buffer`` holds elements in the wire's dtype."""
    return buffer.startswith("wire_")


def describe(step: Step) -> str:
    """Render a step in one short line."""
    match step:
        case Put(src, n, peer, dst, notify):
            flag = "" if notify is None else f", notify {notify}"
            to = f" {span_text(dst, n)}" if n else ""
            text = f"{span_text(src, n) if n else 'nothing'} -> rank {peer}{to}{flag}"
        case Wait(notification):
            text = str(notification)
        case Reduce(dsts, srcs, n, scale):
            times = "" if scale == 1.0 else f"{scale:.4g} * "
            sources = " + ".join(span_text(span, n) for span in srcs)
            text = f"{', '.join(span_text(span, n) for span in dsts)} = {times}({sources})"
        case Copy(dst, src, n, rows):
            several = "" if rows == 1 else f"{rows} rows, the first "
            text = f"{several}{span_text(dst, n)} = {span_text(src, n)}"
        case Call(hook, span, n):
            text = f"{hook} on {span_text(span, n)}"
        case Flush():
            text = ""
    return f"{type(step).__name__} {text}".rstrip()


def span_text(span: Span, n: int) -> str:
    """Render the elements of a span."""
    owner = "" if span.rank is None else f"rank {span.rank} "
    return f"{owner}{span.buffer}[{span.offset}:{span.offset + n}]"
