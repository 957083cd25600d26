"""Allreduces of fixed random data: says the digest of all results."""

from __future__ import annotations

import hashlib

import numpy as np
from rank_tools import say

import pgasdl


def main() -> None:
    with pgasdl.init() as ctx:
        rng = np.random.default_rng(ctx.rank)
        digest = hashlib.sha256()
        segment = ctx.segment(1 << 18)
        for plan in ("gdraa", "tree", "staged", "gdraa-direct", None):
            for count in (1, 1000, 40_000):
                scales = 10.0 ** rng.integers(-3, 4, count)
                values = (rng.standard_normal(count) * scales).astype(np.float32)
                if plan == "gdraa-direct":
                    array = segment.numpy(np.float32, 0, count)
                    array[:] = values
                else:
                    array = values
                for _ in range(3):
                    ctx.allreduce(array, "mean", plan=plan)
                    digest.update(array.tobytes())
                    ctx.barrier()
        digest.update(ctx.world.combine(rng.standard_normal(3000)).tobytes())
        say("digest", digest=digest.hexdigest())
        ctx.barrier()


if __name__ == "__main__":
    main()
