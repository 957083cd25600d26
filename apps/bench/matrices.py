"""Products and remaps of matrices beside other libraries and the machine's limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

import pgasdl.matrix as pm
from bench.comparison import Groups, asked
from bench.jobs import Peer
from pgasdl.errors import MismatchError
from pgasdl.tools.bench.session import Session
from pgasdl.tools.bench.turns import PATIENCE, Contender

_LARGE = 2048  # one call of these is a turn


class Matrices:
    """Square matrices of float32, by rows. Every member is collective."""

    def __init__(self, session: Session, peers: Sequence[Peer], largest: int) -> None:
        self._context, self._ranks = session.context, session.ranks
        self._peers = {peer.name: peer for peer in peers}
        mine = ",".join(self._peers).encode()
        told = self._context.world.allgather("peers of matrices", mine, PATIENCE)[0].decode()
        self._names = [name for name in told.split(",") if name]
        share = 4 * largest * largest // self._context.size
        self._context.pool(6 * share + (64 << 20))

    def product(self, n: int) -> Groups:
        """Return the contenders of a product; first one process's BLAS with a thread per rank."""
        a, b = (pm.full(self._context, (n, n), 1) for _ in range(2))

        def multiply() -> None:
            found = a @ b
            if found.flat.size and found.flat[-1] != n:
                raise MismatchError(f"a product of ones is {found.flat[-1]}, not {n}: no figures")

        ours = {"pgasdl": [self._contender(multiply, n)]}
        return self._beside("product", n, ours, first="blas")

    def remap(self, n: int) -> Groups:
        """Return the contenders of rows to columns; first a copy of as many rows of a block."""
        a = pm.fromfunction(self._context, lambda i, j: i + j, (n, n))
        b = a.remap("columns")
        if b[n - 1, n - 1] != 2 * n - 2:
            raise MismatchError("a remap has changed the last element: no figures")
        rows, columns = a.flat.reshape(-1, n), b.flat.reshape(n, -1)
        spare = np.empty_like(columns)
        width = columns.shape[1]

        def copy() -> None:
            for rank in range(self._context.size):
                place = slice(rank * width, (rank + 1) * width)
                spare[place][: len(rows)] = rows[:, place]

        def remap() -> None:
            a.space.move(a, b.layout, b.flat)

        ours = {
            "copy": [self._contender(copy, n)],
            "pgasdl": [self._contender(remap, n)],
        }
        return self._beside("remap", n, ours, first="copy")

    def _contender(self, call: Callable[[], None], n: int) -> Contender:
        def measure(calls: int) -> list[float]:
            barrier = partial(self._context.barrier, timeout=PATIENCE)
            times = []
            for _ in range(calls):
                barrier()
                began = time.perf_counter()
                call()
                times.append(1e6 * (time.perf_counter() - began))
            return [float(us) for us in self._ranks.latest(np.array(times))]

        return Contender("", measure, 1 if n >= _LARGE else 0)

    def _beside(self, what: str, n: int, ours: Groups, first: str) -> Groups:
        groups = {name: list(group) for name, group in ours.items()}
        for name in self._names:
            peer = self._peers.get(name)  # None: this is not rank 0
            ask = None if peer is None else partial(peer.times, what, n)
            one = Contender("", asked(self._context, ask), 1 if n >= _LARGE else 0)
            groups.setdefault(name, []).append(one)
        return {first: groups.pop(first), **groups} if first in groups else groups
