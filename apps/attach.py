"""One line averages a model's gradients over all ranks while backward runs."""

import argparse

import torch

import pgasdl
import pgasdl.torch

argparse.ArgumentParser(description=__doc__).parse_args()
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

with pgasdl.init() as ctx, pgasdl.torch.attach(model, optimizer, context=ctx):
    for _ in range(100):
        x = torch.randn(16, 8)  # this rank's part of the batch
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()  # a layer's exchange starts when its gradient is there
        optimizer.step()  # and ends before the layer is used again
        optimizer.zero_grad()
    print(f"rank {ctx.rank}: loss {loss:.2f}")
