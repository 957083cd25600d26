"""Ranks that use everything that a kill could leave behind, until they are killed."""

from __future__ import annotations

import os

import numpy as np
from rank_tools import say

import pgasdl
from pgasdl import PeerLostError


def main() -> None:
    with pgasdl.init() as ctx:
        segment = ctx.segment(1 << 20)
        bound = ctx.bind(np.zeros(4096, np.uint8))
        group = ctx.group(range(ctx.size))
        array = np.ones(50_000, np.float32)
        ctx.allreduce(array, op="mean", plan="gdraa")
        say("running", pid=os.getpid(), segment=segment.id, bound=bound.id)
        try:
            while True:
                ctx.allreduce(array, op="mean", plan="gdraa")
                group.barrier()
        except PeerLostError as error:
            say("lost", rank=error.rank, text=str(error))
            raise


if __name__ == "__main__":
    main()
