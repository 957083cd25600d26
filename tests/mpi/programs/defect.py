"""What a library gets wrong, with mpi4py alone. Arguments: which defect."""

from __future__ import annotations

import sys

import numpy as np
from mpi4py import MPI


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


# Before what may be its end.
print(MPI.Get_library_version().splitlines()[0], flush=True)
{"own": compare_and_swap_on_oneself, "window": a_window}[sys.argv[1]]()
