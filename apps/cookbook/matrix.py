"""A matrix product over the ranks: blocks, layouts, and what each step moves.

pgasdl run -n 3 apps/cookbook/matrix.py
"""

import argparse

import numpy as np

import pgasdl
import pgasdl.matrix as pm

EDGE = 600

argparse.ArgumentParser(description=__doc__).parse_args()
with pgasdl.init(log="warning") as ctx:
    ctx.pool(64 << 20)  # products read blocks of other ranks out of the pool
    a = pm.standard_normal(ctx, (EDGE, EDGE), seed=1)  # by rows; the same numbers on any ranks
    b = pm.standard_normal(ctx, (EDGE, EDGE), seed=2)

    c = a @ b  # all ranks call it; each makes its own rows
    positive = np.maximum(c, 0)  # element by element: nothing moves
    total = float(positive.sum())  # every rank gets the same number

    left, right = np.asarray(a), np.asarray(b)  # a copy of the whole on every rank
    assert np.allclose(np.asarray(c), left @ right, atol=1e-3)

    turned = c.remap("columns")  # each rank gives a part of its rows for columns
    for what, moves in (("a @ b", lambda: a @ b), ("remap", lambda: c.remap("columns"))):
        found = pm.explain(ctx, moves)
        if ctx.rank == 0:
            print(f"{what} moves {found.nbytes} bytes in {found.messages} messages")
    print(f"rank {ctx.rank}: {c.layout.name} then {turned.layout.name}, sum {total:.0f}")
