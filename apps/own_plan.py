"""A plan of one's own: registered from outside the package, checked, simulated, chosen, and run.

"flat": everybody sends everything to everybody and adds it up. One latency, where GDRAA takes two.

    pgasdl run -n 3 apps/own_plan.py
    pgasdl tune -n 3 --plan-modules apps/own_plan.py            also bench plans, sim
    PGASDL_PLAN_MODULES=apps/own_plan.py PGASDL_POLICY=@pgasdl.policy pgasdl run -n 3 train.py
"""

import argparse

import numpy as np

import pgasdl
from pgasdl import simulate as sim
from pgasdl.plans import Flush, Plan, PlanSpec, Put, Reduce, Span, Wait, register
from pgasdl.plans.check import assert_ok, check


def flat(rank, size, count, *, kind="average", wire=False, phase=0):
    """The steps of one rank. Nothing says that a slot was read: phases take turns on two sets."""
    peers = [(rank + step) % size for step in range(1, size)]
    everything, mine = Span("data", 0), 2 * rank + phase
    steps = [Put(everything, count, peer, Span("inbox", mine * count), mine) for peer in peers]
    steps += [Wait(2 * peer + phase, peer) for peer in peers]
    steps.append(Flush())  # data may be overwritten
    slots = [Span("inbox", (2 * sender + phase) * count) for sender in range(size)]
    slots[rank] = everything
    steps.append(Reduce((everything,), tuple(slots), count, 1.0 if kind == "sum" else 1.0 / size))
    lanes = (tuple(steps),) if size > 1 and count else ()
    buffers = {"data": count, "inbox": 2 * size * count}
    return Plan("flat", rank, size, count, lanes, buffers, 2 * size)


register(PlanSpec("flat", flat, "all to all: 1 latency", ("average", "sum"), wire=False, phases=2))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for size in range(1, 9):
        assert_ok("flat", size, 10)
    wrong = check([flat(rank, 3, 10) for rank in range(3)])  # with one phase only
    with pgasdl.init(log="warning", policy="allreduce:0-4k:flat") as ctx:
        if ctx.rank == 0:
            for plan in ("flat", "gdraa"):
                us = 1e6 * sim.simulate(sim.flat(32), [sim.Exchange(plan, 100)]).seconds
                print(f"simulated, 32 ranks, 400 bytes: {plan} {us:.1f} us")
            print(f"right for 1 to 8 ranks; with one phase: {wrong[0].rule}")
        array = np.empty(1000, np.float32)
        handle = ctx.allreduce_handle(array, op="mean")  # the policy chooses
        for turn in range(5):
            array[:] = ctx.rank + turn
            handle()
            assert (array == (ctx.size - 1) / 2 + turn).all()
        print(f"rank {ctx.rank} of {ctx.size}: {handle}")


if __name__ == "__main__":
    main()
