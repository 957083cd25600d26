"""Chains of ``chain_size`` ranks; their heads form a chain or a binomial tree.

Paper
    S-Caffe section 5, hierarchical reduce (HR): a chunked chain is best for few ranks and large
    buffers, a binomial tree for many ranks. So ranks are cut in chains of ``chain_size`` (8, the
    paper's ideal); the heads form a chain (chain-chain, CC: to 64 ranks) or a binomial tree
    (chain-binomial, CB: beyond). In the paper a reduce; here also an exchange and a broadcast.
    ``hierarchy`` says which one is taken where nobody names a plan.

Steps: those of ``trees``. With q = chain_size, ranks j q .. j q + q - 1 are a chain, with the first
of them, or the root, as its head; of unlike chains each has its q. A node's child at place 0 is the
next one of its chain. A head has children at places from 1 on: the next head; or those of its
number in a binomial tree of all heads, counted from the root's. The paper reduces the lower level
before the upper one begins; here chunks flow through both without a stop between them.

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

from functools import partial

from pgasdl.plans.algorithms.hierarchy import suits, tuned
from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.algorithms.shapes import Binomial, Chain, Groups, TwoLevel
from pgasdl.plans.algorithms.trees import TREE_KINDS, numbering, slots_of, tree_plan
from pgasdl.plans.plan import Plan, PlanSpec, Sizes

# S-Caffe: the benefit of longer chains decreases beyond this.
CHAIN_SIZE = 8


def build(
    rank: int,
    size: int,
    count: int,
    *,
    upper: str,
    kind: str = "average",
    wire: bool = False,
    root: int = 0,
    chain_size: Sizes = CHAIN_SIZE,
    chunks: int = 0,
) -> Plan:
    """Return rank's plan of the exchange that this module describes."""
    view = RankView(f"chain-{upper}", rank, size, count, kind, wire)
    view.require_sizes("chain_size", chain_size)
    ranks = numbering(view, root, chain_size)
    shape = TwoLevel(ranks, Chain, Chain if upper == "chain" else Binomial)
    return tree_plan(view, shape, ranks, chunks)


def _inbox(
    size: int,
    count: int,
    *,
    upper: str,
    root: int = 0,
    chain_size: Sizes = CHAIN_SIZE,
    chunks: int = 0,
) -> int:
    del chunks
    ranks = Groups(size, chain_size, root)
    return slots_of(TwoLevel(ranks, Chain, Chain if upper == "chain" else Binomial), count)


CHAIN_CHAIN = PlanSpec(
    "chain-chain",
    partial(build, upper="chain"),
    "chunked chains of chain_size ranks, their heads in a chain: S per link, to some 64 ranks",
    kinds=TREE_KINDS,
    suits=suits("chain-chain"),
    options=("root", "chain_size", "chunks"),
    several=("chain_size",),
    tuned=tuned("chain-chain"),
    shares=True,
    by_element=True,
    inbox=partial(_inbox, upper="chain"),
)
CHAIN_BINOMIAL = PlanSpec(
    "chain-binomial",
    partial(build, upper="binomial"),
    "chunked chains of chain_size ranks, their heads in a binomial tree: for many ranks",
    kinds=TREE_KINDS,
    suits=suits("chain-binomial"),
    options=("root", "chain_size", "chunks"),
    several=("chain_size",),
    tuned=tuned("chain-binomial"),
    shares=True,
    by_element=True,
    inbox=partial(_inbox, upper="binomial"),
)
