"""Defects of MPI libraries, with mpi4py alone. Arguments: which defect, a folder for messages."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from mpi4py import MPI

libc = ctypes.CDLL(None, use_errno=True)


def compare_and_swap_on_oneself() -> None:
    memory = np.zeros(8, np.int64)
    window = MPI.Win.Create(memory, 1, MPI.INFO_NULL, MPI.COMM_WORLD)
    window.Lock_all()
    one, zero, old = (np.array([value], np.int64) for value in (1, 0, 7))
    window.Compare_and_swap(one, zero, old, MPI.COMM_WORLD.rank, 0)
    window.Flush(MPI.COMM_WORLD.rank)
    assert old[0] == 0
    window.Unlock_all()
    window.Free()


def a_window() -> None:
    MPI.Win.Allocate(64, 1, MPI.INFO_NULL, MPI.COMM_WORLD).Free()


def windows_of_halves() -> None:
    """One half after the other; each prints the files in shared memory of its new window."""
    world = MPI.COMM_WORLD
    half = world.Split(world.rank // 2)
    for turn in range(2):
        world.Barrier()
        if turn != world.rank // 2:
            continue
        watch = libc.inotify_init1(os.O_NONBLOCK)
        libc.inotify_add_watch(watch, b"/dev/shm", 0x100)  # IN_CREATE
        window = MPI.Win.Allocate(64, 1, MPI.INFO_NULL, half)
        if half.rank == 0:
            with suppress(BlockingIOError):
                events = os.read(watch, 1 << 16)
                print("files", sorted(set(re.findall(rb"osc_[\w.]+", events))), flush=True)
        window.Free()
    world.Barrier()


def abort() -> None:
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 0:
        names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        print([name for name in names if name.startswith("/dev/shm/mpich_shm_")], flush=True)
        time.sleep(0.2)
        MPI.COMM_WORLD.Abort(1)
    MPI.COMM_WORLD.Barrier()


def a_killed_rank() -> None:
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2)
    print("goes on", flush=True)
    MPI.COMM_WORLD.Abort(1)


def a_message_from_anybody() -> None:
    """Repeated: a message is lost only if the library already has it when it is asked for."""
    comm = MPI.COMM_WORLD
    for turn in range(100):
        sent = comm.Isend(bytearray(48), 1 - comm.rank)
        while not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG):
            pass
        received = comm.Irecv(bytearray(48), MPI.ANY_SOURCE, MPI.ANY_TAG)
        end = time.monotonic() + 3
        while not received.Test():
            if time.monotonic() > end:
                # At an abort, a launcher may drop what was printed just before.
                Path(sys.argv[2], f"rank {comm.rank}").write_text(f"never received in turn {turn}")
                comm.Abort(1)
                os._exit(1)  # over UCX, MPICH's Abort may return
        sent.Wait()


# Printed before the defect, which may end the process.
print(MPI.Get_library_version().splitlines()[0], flush=True)
DEFECTS = {
    "abort": abort,
    "halves": windows_of_halves,
    "killed": a_killed_rank,
    "message": a_message_from_anybody,
    "own": compare_and_swap_on_oneself,
    "window": a_window,
}
DEFECTS[sys.argv[1]]()
