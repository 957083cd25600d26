"""Ways into a job through MPI; rank 0 prints what it found. Arguments: which way."""

from __future__ import annotations

import sys
import threading

import mpi4py
import numpy as np

import pgasdl

WAY = sys.argv[1]
if WAY == "late":
    mpi4py.rc.initialize = False

from mpi4py import MPI  # noqa: E402


def used(ctx: pgasdl.Context) -> float:
    """The mean of all ranks' numbers, after notified writes round the ring."""
    segment = ctx.segment(4096)
    numbers = segment.numpy(np.float64)
    right = (ctx.rank + 1) % ctx.size
    for turn in range(1, 51):
        numbers[0] = turn * 1000 + ctx.rank
        ctx.write_notify(segment[0:8], right, segment[64:72], notification=3)
        ctx.notify_waitsome(segment, 3, 1)
        ctx.notify_reset(segment, 3)
        assert numbers[8] == turn * 1000 + (ctx.rank - 1) % ctx.size
        ctx.wait()
        ctx.barrier()
    assert ctx.atomic_fetch_add(segment[128:136], 0, 1) in range(ctx.size)
    ctx.barrier()
    array = np.full(1000, ctx.rank, np.float32)
    ctx.allreduce(array, op="mean")
    return float(array[500])


def make_segments_at_once(world: MPI.Intracomm, ctx: pgasdl.Context) -> None:
    """In both halves of ``world`` at once: each half has its own memory."""
    for _ in range(40):
        world.Barrier()
        segment = ctx.segment(64)
        segment.numpy(np.int64)[0] = 1 + world.rank
        ctx.write_notify(segment[0:8], 1 - ctx.rank, segment[8:16], notification=0)
        ctx.notify_waitsome(segment, 0, 1)
        world.Barrier()
        # The ranks of one half are those of the world that are odd, or even.
        assert segment.numpy(np.int64)[:2].tolist() == [1 + world.rank, 1 + (world.rank + 2) % 4]
        segment.delete()


def main() -> None:
    """Use a context, or several, as the command line says."""
    if WAY == "late":
        assert not MPI.Is_initialized()
        with pgasdl.init(transport="mpi", log="warning") as ctx:
            mean = used(ctx)
    elif WAY == "halves":
        world = MPI.COMM_WORLD
        # In another order than the world's.
        half = world.Split(world.rank % 2, -world.rank)
        with pgasdl.init(comm=half, log="warning") as ctx:
            assert (ctx.rank, ctx.size) == (half.rank, half.size)
            assert ctx.transport_of(1 - ctx.rank) == "mpi"
            mean = used(ctx)
            make_segments_at_once(world, ctx)
        half.Free()
    elif WAY == "shm":
        with pgasdl.init(comm=MPI.COMM_WORLD, transport="shm", log="warning") as ctx:
            assert ctx.transport_of(1 - ctx.rank) == "shm"
            mean = used(ctx)
    elif WAY == "beside":
        # The program's own messages, at the same time and from another thread.
        world = MPI.COMM_WORLD
        got = []

        def exchange() -> None:
            for number in range(200):
                got.append(world.sendrecv(number, 1 - world.rank, source=1 - world.rank))

        with pgasdl.init(log="warning") as ctx:
            thread = threading.Thread(target=exchange)
            thread.start()
            mean = used(ctx)
            thread.join()
        assert got == list(range(200))
    else:
        for _ in range(3):
            with pgasdl.init(log="warning") as ctx:
                mean = used(ctx)
    assert MPI.Is_initialized()
    assert not MPI.Is_finalized()
    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size
    if MPI.COMM_WORLD.rank == 0:
        print(f"{WAY}: mean {mean}, thread level {MPI.Query_thread()}", flush=True)


if __name__ == "__main__":
    main()
