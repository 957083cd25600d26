"""A pipeline with back-pressure: a stage works on one item while the next is on its way to it.

pgasdl run -n 3 apps/cookbook/pipeline.py
"""

import argparse

import numpy as np

import pgasdl

ITEMS, SLOTS, NUMBERS = 20, 4, 1000
SLOT = 4 * NUMBERS  # bytes
FULL, FREE = 0, SLOTS  # notifications: my slot s has an item; my successor's slot s is free


def taken(ctx: pgasdl.Context, inbox: pgasdl.Segment, flag: int) -> None:
    """Wait for one flag, and take it."""
    ctx.notify_waitsome(inbox, flag, 1)
    ctx.notify_reset(inbox, flag)


argparse.ArgumentParser(description=__doc__).parse_args()
with pgasdl.init(log="warning") as ctx:
    inbox = ctx.segment(SLOTS * SLOT, notifications=2 * SLOTS)  # my predecessor writes to it
    outbox = ctx.segment(SLOTS * SLOT)
    for item in range(ITEMS):
        slot = item % SLOTS
        place = slice(slot * SLOT, (slot + 1) * SLOT)
        if ctx.rank == 0:
            numbers = np.full(NUMBERS, item, np.float32)
        else:
            taken(ctx, inbox, FULL + slot)
            numbers = inbox.numpy(np.float32, place.start, NUMBERS) + 1  # the work of a stage
            ctx.notify(ctx.rank - 1, inbox, FREE + slot)  # its next item may come
        if ctx.rank == ctx.size - 1:
            assert (numbers == item + ctx.rank).all()
            print(f"item {item} has passed {ctx.size} stages")
            continue
        if item >= SLOTS:  # no more items under way than slots: a slow stage slows those before it
            taken(ctx, inbox, FREE + slot)  # and what I sent from this slot has left
        outbox.numpy(np.float32, place.start, NUMBERS)[:] = numbers
        ctx.write_notify(outbox[place], ctx.rank + 1, inbox[place], FULL + slot)
    ctx.wait()
    ctx.barrier()  # my successor still says that slots are free
