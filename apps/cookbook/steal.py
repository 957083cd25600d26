"""Work stealing: a rank without tasks of its own takes one of another rank's, by an atomic.

The rank that is robbed takes no part in it.

pgasdl run -n 3 apps/cookbook/steal.py
"""

import argparse
import time

import numpy as np

import pgasdl

TASKS = 40  # of a rank

argparse.ArgumentParser(description=__doc__).parse_args()
with pgasdl.init(log="warning") as ctx:
    tickets = ctx.segment(8)  # how many of my tasks were taken, by whomever
    done = np.zeros(ctx.size * TASKS, np.int32)  # by this rank
    ctx.barrier()
    for distance in range(ctx.size):  # my own first
        owner = (ctx.rank + distance) % ctx.size
        while True:
            ticket = ctx.atomic_fetch_add(tickets[0:8], owner, 1)
            if ticket >= TASKS:
                break
            time.sleep(0.002 if owner == 0 else 0.0002)  # rank 0's tasks are long ones
            done[owner * TASKS + ticket] += 1
    print(f"rank {ctx.rank}: {done.sum()} tasks, {done[:TASKS].sum()} of them of rank 0")
    ctx.allreduce(done)
    assert (done == 1).all(), "a task was done twice, or not at all"
