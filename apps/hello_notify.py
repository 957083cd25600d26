"""The first program: each rank writes to its right neighbour, and raises a flag there."""

import argparse

import numpy as np

import pgasdl

argparse.ArgumentParser(description=__doc__).parse_args()
with pgasdl.init() as ctx:  # rank and size come from the launcher
    segment = ctx.segment(4096)  # memory that every rank can write to
    numbers = segment.numpy(np.float32)  # a view, not a copy
    right = (ctx.rank + 1) % ctx.size
    numbers[0] = ctx.rank
    ctx.write_notify(segment[0:4], right, segment[64:68], notification=7)  # they call nothing
    found = ctx.notify_waitsome(segment)  # sleeps until a flag is up; the data is there then
    ctx.notify_reset(segment, found)  # takes the flag: each is handed out once
    print(f"rank {ctx.rank} of {ctx.size} got {numbers[16]:.0f}")  # bytes 64 to 68

    gradient = np.full(1000, ctx.rank, np.float32)
    ctx.allreduce(gradient, op="mean")  # in place; all ranks get the same bits
    ctx.wait()  # the source of the write may change from here on
