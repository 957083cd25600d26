"""A replica group of one rank under torchft: ``torchft_replica.py NAME LIGHTHOUSE SECONDS``.

All replicas have the same data, so the average of any two has the bits of one: whoever comes and
goes, the losses are those of one process, which ``losses`` computes.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer

from pgasdl.torch.ft import ProcessGroupPgasdl


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 1))
    return model, torch.optim.Adam(model.parameters())


def loss_at(step: int, model: nn.Module) -> torch.Tensor:
    data = torch.randn(16, 20, generator=torch.Generator().manual_seed(step))
    return nn.functional.mse_loss(model(data), data.sum(1, keepdim=True))


def losses(steps: int) -> list[str]:
    """Of one process."""
    model, optimizer = made()
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_at(step, model)
        loss.backward()
        optimizer.step()
        found.append(loss.item().hex())
    return found


def main(name: str, lighthouse: str, seconds: float) -> None:
    model, optimizer = made()

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupPgasdl(timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=name,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=timedelta(seconds=10),
        init_sync=False,  # else one that begins beside another has no part in the first average
    )
    parallel, stepping = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        stepping.zero_grad()
        step = manager.current_step()
        loss = loss_at(step, parallel)
        loss.backward()
        counts = manager.is_participating()  # else it takes over another's state
        stepping.step()
        if counts and manager.current_step() == step + 1:  # else it was not committed
            print(name, step, manager.num_participants(), loss.item().hex(), flush=True)
        time.sleep(0.01)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
