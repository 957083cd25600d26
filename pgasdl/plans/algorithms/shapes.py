"""Shapes of trees, and the numbering of ranks: from the root, or by turns over groups.

Nodes are numbered from 0, the root. A child's place is the number of its slot at the parent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from pgasdl.plans.plan import Sizes, begins, lengths


class Shape(Protocol):
    """A tree: the children and the parent of each node. Node 0 is the root."""

    @property
    def degree(self) -> int:
        """Return the number of places at every node."""

    def parent(self, node: int) -> tuple[int, int]:
        """Return the parent of a node other than 0, and the node's place there."""

    def children(self, node: int) -> list[tuple[int, int]]:
        """Return ``(place, child)`` of a node's children, by place."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain: the child of each node is the next one."""

    size: int
    degree: int = 1

    def parent(self, node: int) -> tuple[int, int]:
        """Return the node before."""
        return node - 1, 0

    def children(self, node: int) -> list[tuple[int, int]]:
        """Return the node behind."""
        return [(0, node + 1)] if node + 1 < self.size else []


@dataclass(frozen=True, slots=True)
class Binomial:
    """A binomial tree: the children of v are v + 1, v + 2, v + 4, ... up to v's lowest set bit.

    A child's place is the logarithm of its distance.

    >>> [[child for _, child in Binomial(6).children(node)] for node in (0, 2, 4)]
    [[1, 2, 4], [3], [5]]
    """

    size: int

    @property
    def degree(self) -> int:
        """Return the number of places: the root has a child at every power of two."""
        return (self.size - 1).bit_length()

    def parent(self, node: int) -> tuple[int, int]:
        """Return the node without its lowest bit."""
        distance = node & -node
        return node - distance, distance.bit_length() - 1

    def children(self, node: int) -> list[tuple[int, int]]:
        """Return the children, nearest first."""
        lowest = node & -node if node else self.size
        reach = ((place, node + (1 << place)) for place in range(self.degree))
        return [(place, each) for place, each in reach if each - node < lowest and each < self.size]


@dataclass(frozen=True, slots=True)
class Kary:
    """A k-ary tree, numbered level by level."""

    size: int
    arity: int

    @property
    def degree(self) -> int:
        """Return the number of places: that of the root's children."""
        return min(self.arity, self.size - 1)

    def parent(self, node: int) -> tuple[int, int]:
        """Return the node one level up."""
        return divmod(node - 1, self.arity)

    def children(self, node: int) -> list[tuple[int, int]]:
        """Return the nodes one level down."""
        first = self.arity * node + 1
        return list(enumerate(range(first, min(first + self.arity, self.size))))


@dataclass(frozen=True, slots=True)
class Groups:
    """Ranks in groups of neighbours, numbered from a root: its group first, and it first there.

    The other groups follow in their order, each from its first rank on.

    >>> groups = Groups(5, 2, root=3)
    >>> [groups.rank(node) for node in range(5)]
    [3, 2, 4, 0, 1]
    >>> [groups.node(rank) for rank in range(5)]
    [3, 4, 1, 0, 2]
    """

    size: int
    group_size: Sizes
    root: int = 0

    @property
    def number(self) -> int:
        """Number of groups."""
        return len(self._edges) - 1

    @property
    def largest(self) -> int:
        """Ranks of the largest group."""
        return _largest(self.size, self.group_size)

    def begin(self, number: int) -> int:
        """Return the first node of the group that is the given one from the root's on."""
        first, _ = self._home
        return (self._edges[(self._group(self.root) + number) % self.number] - first) % self.size

    def number_of(self, node: int) -> int:
        """Return which group a node is in, from the root's on."""
        first, _ = self._home
        return (self._group((first + node) % self.size) - self._group(self.root)) % self.number

    def rank(self, node: int) -> int:
        """Return a node's rank."""
        first, n = self._home
        at = (node + self.root - first) % n if node < n else node
        return (first + at) % self.size

    def node(self, rank: int) -> int:
        """Return a rank's node."""
        first, n = self._home
        at = (rank - first) % self.size
        return (at + first - self.root) % n if at < n else at

    @property
    def _edges(self) -> tuple[int, ...]:
        return begins(self.size, self.group_size)

    @property
    def _home(self) -> tuple[int, int]:
        """The first rank of the root's group, and how many it has."""
        group = self._group(self.root)
        return self._edges[group], self._edges[group + 1] - self._edges[group]

    def _group(self, rank: int) -> int:
        return bisect_right(self._edges, rank) - 1


@lru_cache(1024)
def _largest(size: int, group_size: Sizes) -> int:
    return max(lengths(size, group_size))


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Ranks numbered round-robin over supernodes of ``group_size`` neighbours."""

    size: int
    group_size: int

    def _full(self) -> tuple[int, int]:
        """Return the number of supernodes, and the number of ranks in the last one."""
        groups = -(-self.size // self.group_size)
        return groups, self.size - (groups - 1) * self.group_size

    def node(self, rank: int) -> int:
        """Return a rank's node: first the first ranks of all supernodes, then the second ones.

        >>> [RoundRobin(7, 3).node(rank) for rank in range(7)]
        [0, 3, 5, 1, 4, 6, 2]
        """
        group, place = divmod(rank, self.group_size)
        groups, last = self._full()
        return place * groups + group - max(0, place - last)

    def rank(self, node: int) -> int:
        """Return a node's rank.

        >>> [RoundRobin(7, 3).rank(node) for node in range(7)]
        [0, 3, 6, 1, 4, 2, 5]
        """
        groups, last = self._full()
        if node < last * groups:
            place, group = divmod(node, groups)
        else:
            place, group = divmod(node - last * groups, groups - 1)
            place += last
        return group * self.group_size + place


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """A tree in each group, and one of the groups' first nodes, the heads.

    The places of a group's tree come first, then those of the heads' tree.
    """

    groups: Groups
    lower: Callable[[int], Shape]
    upper: Callable[[int], Shape]

    @property
    def degree(self) -> int:
        """Return the number of places."""
        return self._inside + self.upper(self.groups.number).degree

    @property
    def _inside(self) -> int:
        return self.lower(self.groups.largest).degree

    def parent(self, node: int) -> tuple[int, int]:
        """Return the node above in the group, or the head above."""
        number = self.groups.number_of(node)
        begin = self.groups.begin(number)
        if node > begin:
            above, place = self.lower(self.groups.largest).parent(node - begin)
            return begin + above, place
        above, place = self.upper(self.groups.number).parent(number)
        return self.groups.begin(above), self._inside + place

    def children(self, node: int) -> list[tuple[int, int]]:
        """Return the nodes below in the group, and the heads below."""
        groups = self.groups
        number = groups.number_of(node)
        begin = groups.begin(number)
        end = groups.begin(number + 1) if number + 1 < groups.number else groups.size
        below = [
            (place, begin + child)
            for place, child in self.lower(end - begin).children(node - begin)
        ]
        if node == begin:
            heads = self.upper(groups.number).children(number)
            below += [(self._inside + place, groups.begin(head)) for place, head in heads]
        return below
