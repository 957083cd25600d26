"""A training loop's shape: torch's DataLoader with forked workers while a context is open."""

from __future__ import annotations

import numpy as np
import torch
from rank_tools import say
from torch.utils.data import DataLoader, TensorDataset

import pgasdl


def main() -> None:
    torch.set_num_threads(1)
    with pgasdl.init() as ctx:
        segment = ctx.segment(4096)
        data = TensorDataset(torch.arange(40.0).reshape(40, 1))
        total = 0.0
        for _ in range(2):
            loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
            for (batch,) in loader:
                gradient = np.asarray(batch.sum()).reshape(1).astype(np.float32)
                ctx.allreduce(gradient, "sum", plan="gdraa")
                total += float(gradient[0])
            ctx.write_notify(segment[0:8], (ctx.rank + 1) % ctx.size, segment[8:16], 1)
            ctx.notify_waitsome(segment, 1, 1)
            ctx.notify_reset(segment, 1)
        say("done", total=total, health=ctx.health())
        ctx.barrier()


if __name__ == "__main__":
    main()
