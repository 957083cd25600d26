"""The programs of symmetric_programs.py between processes, with pgasdl's names for torch's."""

from __future__ import annotations

import os
import sys

import torch
from symmetric_programs import (
    one_shot_all_reduce,
    ring_of_puts,
    ring_through_buffers,
    ring_through_windows,
)
from torch import distributed

import pgasdl
from pgasdl.torch import Window
from pgasdl.torch import symmetric_memory as symm_mem


def main() -> None:
    """Run all that this transport can; with a file for torch's store, in torch's groups, too."""
    torch.set_num_threads(1)
    with pgasdl.init(timeout=60) as ctx:
        tensor = symm_mem.empty(4)  # of the process's context
        assert symm_mem.is_symm_mem_tensor(tensor[1:])
        assert not symm_mem.is_symm_mem_tensor(tensor.clone())
        groups = [ctx, ctx.world]
        if len(sys.argv) > 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # in whatever container
            store = f"file://{sys.argv[1]}"
            distributed.init_process_group("gloo", store, rank=ctx.rank, world_size=ctx.size)
            groups += [distributed.group.WORLD, distributed.group.WORLD.group_name]
        for group in groups:
            if ctx.mapped:
                one_shot_all_reduce(symm_mem, group)
                ring_through_buffers(symm_mem, group)
            ring_of_puts(symm_mem, group)
            ring_of_puts(symm_mem, group, 3, 200_000)
            for async_op in (False, True):
                for count, dtype in ((4, torch.float32), (70_000, torch.int8)):
                    ring_through_windows(Window(group), ctx.rank, ctx.size, count, dtype, async_op)
        if len(sys.argv) > 1:
            distributed.destroy_process_group()
        ctx.barrier()
        if ctx.rank == 0:
            print(f"{ctx.size} ranks are right, mapped {ctx.mapped}")


if __name__ == "__main__":
    main()
