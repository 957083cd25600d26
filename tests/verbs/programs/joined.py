"""A job that MPI starts over two hosts: ``joined.py ROUTES``, the routes of rank 0.

Operations between all ranks, as in exact.py, then exchanges of nodes.py; rank 0 says how it went.
"""

from __future__ import annotations

import sys

import exact
import nodes
import numpy as np
from mpi4py import MPI

import pgasdl

PARTS = (
    exact.lists,
    exact.atomics,
    exact.writes_and_notifications,
    exact.reductions,
    exact.messages,
)
PLANS = ("gdraa", "gdraa-nodes", "tree", "halving-doubling")


def main(wanted: str) -> None:
    comm = MPI.COMM_WORLD
    with pgasdl.init(comm=comm) as ctx:
        assert (ctx.rank, ctx.size) == (comm.rank, comm.size)
        assert ctx.launch.local_size == comm.size // 2 == ctx.world.node_size
        for part in PARTS:
            part(ctx)
        for plan in PLANS:
            for kind in ("average", "update"):
                nodes.exchange(ctx.world, plan, kind, np.float32)
        # The program can still use MPI itself.
        assert comm.allreduce(ctx.rank) == sum(range(comm.size))
        routes = str(ctx.topology.routes)
        same = ctx.topology.routes.names == tuple(wanted.split())
        assert same or ctx.rank, routes
        if ctx.rank == 0:
            print(f"exact: {routes}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
