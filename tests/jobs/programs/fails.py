"""Rank 1 dies between two exchanges; the others leave a flight record."""

import os

import numpy as np

import pgasdl

with pgasdl.init() as ctx:
    array = np.ones(8, np.float32)
    ctx.allreduce(array)
    if ctx.rank == 1:
        os._exit(5)
    ctx.allreduce(array)
