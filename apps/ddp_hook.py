"""A hook averages DDP's buckets; all else stays with another backend."""

import argparse

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import pgasdl
from pgasdl.torch import DDPState, ddp_hook

argparse.ArgumentParser(description=__doc__).parse_args()
distributed.init_process_group("gloo")
with pgasdl.init() as ctx:
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    model.register_comm_hook(DDPState(ctx), ddp_hook)
    model(torch.randn(16, 8)).square().mean().backward()
    print(f"rank {ctx.rank}: {model.module.weight.grad.sum():.2f}")
distributed.destroy_process_group()
