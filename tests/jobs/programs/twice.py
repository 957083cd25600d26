"""Obeys while it is paused until a user stops it: first all ranks, then without rank 0."""

import pgasdl
import pgasdl.jobs

with pgasdl.init() as ctx:
    for phase in range(2):
        ranks = range(phase, ctx.size)
        if ctx.rank in ranks:
            with pgasdl.jobs.connect(ctx, group=ctx.group(ranks), paused=True) as job:

                @job.on("own")
                def _(value: int) -> None:
                    print(f"rank {ctx.rank} gets {value}", flush=True)

                print(f"phase {phase}", flush=True)
                assert not job.begin(0)
    ctx.barrier()
