"""Exchanges of layers by mpi4py, in a job of their own, which our rank 0 asks in its turn."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pgasdl.tools.bench.peers import Peer, PeerKind
from pipeline.buckets import FUSED, cuts
from pipeline.trace import Recorder

_PIECE = 1 << 20  # elements: large calls are faster in 4 MB pieces


class MpiLayers:
    """``MPI_Iallreduce`` for each layer; or, fused, ``MPI_Allreduce`` of all after backward."""

    sums = True

    def __init__(self, names: Sequence[str], counts: Sequence[int], nbytes: int) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.recorder, self._names = Recorder(), names
        self._fused = nbytes == FUSED
        self.plan = "in 4 MB pieces" if self._fused else f"{len(cuts(counts, nbytes))} calls"
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
        for start in range(0, len(self._memory), _PIECE):
            piece = [self._memory[start : start + _PIECE], self._mpi.FLOAT]
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
    apps = str(Path(__file__).parent.parent)
    kind = PeerKind("pipeline.mpi", ("mpi4py",), mpi, {"PYTHONPATH": apps})
    return Peer(mpi, size, kind)


def main() -> None:
    """Answer, as one process of an MPI job."""
    import torch
    from mpi4py import MPI

    from pgasdl.tools.bench.peer import socket_path
    from pipeline.contenders import Local
    from pipeline.settings import Settings

    comm = MPI.COMM_WORLD
    made: list[Local] = []
    version = " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].split())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(socket_path())
        lines = connection.makefile("rw", encoding="utf-8")
        answer: Any = {"rank": comm.Get_rank(), "size": comm.Get_size(), "version": version}
        while True:
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
            command = json.loads(lines.readline() or '{"op": "end"}')
            match command["op"]:
                case "end":
                    return
                case "make":
                    settings = Settings(**command["settings"])
                    torch.set_num_threads(settings.threads)
                    made.append(make(settings, command["nbytes"], comm))
                    answer = made[-1].runner.plan
                case "turn":
                    answer = made[command["number"]].turn(command["iterations"])
                case "exchange":
                    answer = made[command["number"]].exchange()
                case "trace":
                    answer = made[command["number"]].trace(command["iterations"])


def make(settings: Any, nbytes: int, comm: Any) -> Any:
    """Make a contender in this job."""
    from pipeline.contenders import Local
    from pipeline.training import ByLayers
    from pipeline.waiting import WaitingRunner
    from pipeline.workload import workload

    of, rank, size = settings, comm.Get_rank(), comm.Get_size()
    work = workload(of.network, of.batch, of.size)
    exchange = MpiLayers(work.names, work.counts, nbytes)
    runner: Any
    if of.compute == "wait":
        runner = WaitingRunner(work, exchange, of.seconds, rank, size, write=of.write)
    else:
        runner = ByLayers(of.network, of.batch, of.size, rank, size, work, exchange)
    return Local(runner, comm.Barrier)


if __name__ == "__main__":
    main()
