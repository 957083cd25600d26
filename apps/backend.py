"""A program for torch.distributed: only the backend's name is ours."""

import argparse

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

argparse.ArgumentParser(description=__doc__).parse_args()
distributed.init_process_group("pgasdl")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
model(torch.randn(16, 8)).square().mean().backward()
print(f"rank {distributed.get_rank()}: {model.module.weight.grad.sum():.2f}")
distributed.destroy_process_group()
