"""Chains of ``chain_size`` ranks; their heads form a chain or a binomial tree.

Paper
    S-Caffe section 5, hierarchical reduce (HR): a chunked chain is best for few ranks and large
    buffers, a binomial tree for many ranks. So ranks are cut in chains of ``chain_size`` (8, the
    paper's ideal); the heads form a chain (chain-chain, CC: to 64 ranks) or a binomial tree
    (chain-binomial, CB: beyond). In the paper a reduce; here also an exchange and a broadcast.

Steps on node v = (rank - root) mod P: those of ``trees``. With q = chain_size, v's child at place 0
is v + 1, in its chain. A head (v mod q = 0) has children at places from 1 on: the next head v + q;
or, as head number j = v / q, those of node j in a binomial tree of all heads. The paper reduces the
lower level before the upper one begins; here chunks flow through both without a stop between them.

Cost, in n chunks, with m = ceil(P / q) heads
    chain-chain     reduce (n + q + m - 3) t(S/n) at most; a head takes two chunks per step
    chain-binomial  reduce (n + q + ceil(log2 m) - 2) t(S/n), the root taking up to
                    ceil(log2 m) + 1 chunks per step: with many, its own link decides
    An exchange takes both ways, overlapped. S per link and direction.
    Inbox: 2 S, or (1 + ceil(log2 m)) S.

Which message proves a buffer free, and wire precision: as in ``trees``.

Example: P = 5, chain_size 2, root 0: chains 0-1, 2-3 and 4. chain-chain: 0 has the children 1 and
2, 2 has 3 and 4. 40 elements in one chunk, slots of 48. Rank 2 runs
    Wait 0;  Wait 1;  Reduce data[0:40] = data[0:40] + inbox[0:40] + inbox[48:88]
    Put data[0:40] -> rank 0 inbox[48:88], notify 1;  Wait 2
    Put data[0:40] -> rank 4 data[0:40], notify 2;  the same -> rank 3;  Flush
chain-binomial: 0 has the children 1, 2 and 4 (slots 0, 1 and 2), 2 has 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from pgasdl.plans.algorithms.chain import Chain
from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.algorithms.tree import Binomial
from pgasdl.plans.algorithms.trees import CHAIN_BYTES, CHAIN_RANKS, TREE_KINDS, Shape, tree_plan
from pgasdl.plans.plan import ROOTED, Case, Plan, PlanSpec

# S-Caffe: the benefit of longer chains decreases beyond this.
CHAIN_SIZE = 8


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """Chains below, and the tree ``upper`` of their heads."""

    size: int
    chain_size: int
    upper: Shape

    @property
    def degree(self) -> int:
        """Return the number of places: 0 is for the chain, the others for the upper level."""
        return 1 + self.upper.degree

    def parent(self, node: int) -> tuple[int, int]:
        """Return the node before in the chain, or the head above."""
        head, place = divmod(node, self.chain_size)
        if place:
            return node - 1, 0
        above, place = self.upper.parent(head)
        return above * self.chain_size, 1 + place

    def children(self, node: int) -> list[tuple[int, int]]:
        """Return the node behind in the chain, and the heads below."""
        head, place = divmod(node, self.chain_size)
        behind = node + 1
        below = [(0, behind)] if behind < self.size and behind % self.chain_size else []
        if place == 0:
            heads = self.upper.children(head)
            below += [(1 + place, child * self.chain_size) for place, child in heads]
        return below


def build(
    rank: int,
    size: int,
    count: int,
    *,
    upper: str,
    kind: str = "average",
    wire: bool = False,
    root: int = 0,
    chain_size: int = CHAIN_SIZE,
    chunks: int = 0,
) -> Plan:
    """Return rank's plan of the exchange that this module describes."""
    view = RankView(f"chain-{upper}", rank, size, count, kind, wire)
    view.require("chain_size", chain_size, 1)
    heads = -(-size // chain_size)
    over: Shape = Chain(heads) if upper == "chain" else Binomial(heads)
    return tree_plan(view, TwoLevel(size, chain_size, over), root, chunks)


def _suits(case: Case) -> bool:
    many = case.members.size > CHAIN_RANKS
    return case.kind in ROOTED and many and case.nbytes >= CHAIN_BYTES


CHAIN_CHAIN = PlanSpec(
    "chain-chain",
    partial(build, upper="chain"),
    "chunked chains of chain_size ranks, their heads in a chain: S per link, to some 64 ranks",
    kinds=TREE_KINDS,
    options=("root", "chain_size", "chunks"),
    node_option="chain_size",
    shares=True,
    by_element=True,
)
CHAIN_BINOMIAL = PlanSpec(
    "chain-binomial",
    partial(build, upper="binomial"),
    "chunked chains of chain_size ranks, their heads in a binomial tree: for many ranks",
    kinds=TREE_KINDS,
    suits=_suits,
    options=("root", "chain_size", "chunks"),
    node_option="chain_size",
    shares=True,
    by_element=True,
)
