"""Exchanges of layers by mpi4py, in a job of their own, which our rank 0 asks in its turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bench.cuts import FUSED, buckets, pieces
from bench.jobs import Peer, PeerKind
from bench.pipeline.cases import Local
from bench.pipeline.settings import Settings
from bench.pipeline.training import ByLayers
from bench.pipeline.waiting import WaitingRunner
from bench.pipeline.workload import workload
from bench.serving import run, serve
from bench.timeline import Recorder, Span
from pgasdl.runtime.mpi.library import version


class MpiLayers:
    """``MPI_Iallreduce`` for each layer; or, fused, ``MPI_Allreduce`` of all after backward."""

    sums = True

    def __init__(self, names: Sequence[str], counts: Sequence[int], nbytes: int) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.recorder, self._names = Recorder(), names
        self._fused = nbytes == FUSED
        self.plan = "in 4 MB pieces" if self._fused else f"{len(buckets(counts, nbytes))} calls"
        self._memory = np.zeros(sum(counts), np.float32)
        self.gradients = np.split(self._memory, np.cumsum(counts)[:-1])
        self._under_way: dict[int, tuple[Any, float]] = {}

    def ready(self, layer: int) -> None:
        if self._fused:
            return
        buffer = [self.gradients[layer], self._mpi.FLOAT]
        request = self._comm.Iallreduce(self._mpi.IN_PLACE, buffer, self._mpi.SUM)
        self._under_way[layer] = request, time.monotonic()
        next(iter(self._under_way.values()))[0].Test()  # lets MPI advance all of them

    def backward_done(self) -> None:
        if not self._fused:
            return
        began = time.monotonic()
        for part in np.split(self._memory, np.cumsum(pieces(len(self._memory)))[:-1]):
            piece = [part, self._mpi.FLOAT]
            self._comm.Allreduce(self._mpi.IN_PLACE, piece, self._mpi.SUM)
        self.recorder.add("exchange", "all", began, time.monotonic())

    def take(self, layer: int) -> None:
        if layer in self._under_way:
            request, began = self._under_way.pop(layer)
            request.Wait()
            self.recorder.add("exchange", self._names[layer], began, time.monotonic())

    def drain(self) -> None:
        for layer in list(self._under_way):
            self.take(layer)

    def result(self, layer: int) -> float:
        return float(self.gradients[layer][0]) / self._comm.Get_size()

    def exchange(self) -> float:
        self._comm.Barrier()
        began = time.monotonic()
        for layer in range(len(self.gradients)):
            self.ready(layer)
        self.backward_done()
        self.drain()
        return time.monotonic() - began

    def close(self) -> None:
        pass


def start(mpi: str, size: int) -> Peer:
    """Start the job. Raises UnavailableError with the reason why not."""
    return Peer(mpi, size, PeerKind("bench.pipeline.mpi", ("mpi4py",), mpi))


class Cases:
    """The variants of this process of an MPI job, numbered as they are made."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._made: list[Local] = []

    def make(self, settings: dict[str, Any], nbytes: int) -> str:
        """Make one more; return its plan."""
        of, rank, size = Settings(**settings), self._comm.Get_rank(), self._comm.Get_size()
        torch.set_num_threads(of.threads)
        work = workload(of.network, of.batch, of.size)
        exchange = MpiLayers(work.names, work.counts, nbytes)
        runner: Any
        if of.compute == "wait":
            runner = WaitingRunner(work, exchange, of.seconds, rank, size, write=of.write)
        else:
            runner = ByLayers(of.network, of.batch, of.size, rank, size, work, exchange)
        self._made.append(Local(runner, self._comm.Barrier))
        return runner.plan

    def turn(self, number: int, iterations: int) -> float:
        """Return the seconds of an iteration."""
        return self._made[number].turn(iterations)

    def exchange(self, number: int) -> float:
        """Return the seconds of an exchange alone."""
        return self._made[number].exchange()

    def trace(self, number: int, iterations: int) -> list[Span]:
        """Return the spans of some iterations."""
        return self._made[number].trace(iterations)


def main() -> None:
    """Answer, as one process of an MPI job."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    serve(Cases(comm), comm.Get_rank(), comm.Get_size(), version(MPI))


if __name__ == "__main__":
    run(main)
