"""DDP, also compiled, FSDP2, a device mesh, DTensor and a checkpoint, over the backend "pgasdl".

An ordinary program for torchrun: nothing in it but its end knows the backend. Rank 0 prints what
each way has trained; the test compares that with the same program over gloo.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from ending import end_at_once
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    ).double()


def train(model: nn.Module, first: int = 0, last: int = 4, state: Any = None) -> Any:
    """Train some steps; return the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    if state is not None:
        state(optimizer)
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + distributed.get_rank())
        x = torch.randn(6, 8, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return optimizer


def sharded() -> nn.Module:
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


def told(what: str, model: nn.Module) -> None:
    """Print a sum that every bit of the weights enters, and that all ranks agree on."""
    full = [
        each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()
    ]
    total = sum(float((each.detach() * (1 + i)).sum()) for i, each in enumerate(full))
    everybody: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everybody, total)
    assert len(set(everybody)) == 1, everybody
    if distributed.get_rank() == 0:
        print(f"{what}: {total:.12f}", flush=True)


def with_ddp() -> None:
    ddp = DistributedDataParallel(network(), bucket_cap_mb=0.002)
    train(ddp)
    told("DDP", ddp)


def compiled() -> None:
    """A model whose buffers are sent, and functions with calls that torch.compile breaks at."""
    ddp = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(8), network()).double())
    train(torch.compile(ddp, backend="aot_eager"))
    told("compiled DDP", ddp)
    for function in (sent, gathered, awaited, counted):
        x = torch.full((3,), distributed.get_rank() + 1.0)
        result = torch.compile(function, backend="aot_eager")(x)
        told(f"compiled {function.__name__}", nn.ParameterList([result]))


def sent(x: torch.Tensor) -> torch.Tensor:
    distributed.broadcast(x, 1)
    distributed.barrier()
    return x * 2


def gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(2)]
    distributed.all_gather(parts, x)
    return parts[0] + 2 * parts[1]


def awaited(x: torch.Tensor) -> torch.Tensor:
    work = distributed.all_reduce(x, async_op=True)
    work.wait()
    return x * 2


def counted(x: torch.Tensor) -> torch.Tensor:
    group = distributed.group.WORLD
    return 0 * x + group.size() + len(distributed.get_process_group_ranks(group))


def with_fsdp() -> None:
    model = sharded()
    train(model)
    told("FSDP2", model)


def resumed() -> None:
    """Train half of the way, write a checkpoint, and train the other half from it."""
    model = sharded()
    optimizer = train(model, 0, 2)
    folder = [tempfile.mkdtemp() if distributed.get_rank() == 0 else None]
    distributed.broadcast_object_list(folder)
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
    again = sharded()

    def load(fresh: Any) -> None:
        weights, state = get_state_dict(again, fresh)
        stored = {"model": weights, "optimizer": state}
        checkpoint.load(stored, checkpoint_id=folder[0])
        set_state_dict(
            again, fresh, model_state_dict=stored["model"], optim_state_dict=stored["optimizer"]
        )

    train(again, 2, 4, load)
    told("FSDP2, resumed", again)


def with_a_mesh() -> None:
    size = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("part",))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallel = parallelize_module(network(), mesh, plan)
    train(parallel)
    told("tensor parallel", parallel)

    whole = torch.arange(4.0 * size * size).reshape(2 * size, 2 * size)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.full_tensor(), whole)
    product = rows @ columns.redistribute(mesh, [Replicate()])
    assert torch.equal(product.full_tensor(), whole @ whole)


WAYS = {
    "ddp": with_ddp,
    "compiled": compiled,
    "fsdp": with_fsdp,
    "resumed": resumed,
    "mesh": with_a_mesh,
}


def main() -> None:
    """Train in each way that is asked for."""
    torch.set_num_threads(1)
    distributed.init_process_group(sys.argv[1])
    assert distributed.get_backend() == sys.argv[1]
    for way in sys.argv[2:]:
        WAYS[way]()
    distributed.barrier()
    distributed.destroy_process_group()
    if sys.argv[1] == "gloo":
        end_at_once()


if __name__ == "__main__":
    main()
