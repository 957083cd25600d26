"""DTensors as distributed matrices and back: the same memory, by torchrun over backend "pgasdl"."""

from __future__ import annotations

import numpy as np
import torch
from ending import end_at_once
from torch import distributed
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import pgasdl.context
import pgasdl.matrix as pm

distributed.init_process_group("pgasdl")
ctx = pgasdl.context.current()
assert ctx is not None
mesh = distributed.init_device_mesh("cpu", (ctx.size,))
for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
    for shape in ((5, 4), (1, 3), (7,)):
        whole = torch.arange(float(np.prod(shape))).reshape(shape).to(dtype)
        for placement in (Shard(0), Shard(1), Replicate())[:: 1 if len(shape) == 2 else 2]:
            tensor = distribute_tensor(whole.clone(), mesh, [placement])
            matrix = pm.from_dtensor(ctx, tensor)
            assert np.array_equal(np.asarray(matrix).astype(float), whole.double().numpy())
            matrix += 1  # in place: the tensor's memory
            assert torch.equal(tensor.full_tensor(), whole + 1), (dtype, shape, placement)
            back = pm.to_dtensor(matrix, mesh)
            assert (back.placements, back.shape) == (tensor.placements, tensor.shape)
            assert torch.equal(back.full_tensor(), whole + 1)
            if matrix.flat.size:
                assert back.to_local().data_ptr() == tensor.to_local().data_ptr()
turned = pm.to_dtensor(pm.standard_normal(ctx, (6, 5), 1, "columns"), mesh)
product = turned @ turned.T  # DTensor's own product, over our backend
assert product.shape == (6, 6)
refused = 0
for wrong in (
    lambda: pm.from_dtensor(ctx, DTensor.from_local(torch.ones(2, 2), mesh, [Partial()])),
    lambda: pm.to_dtensor(pm.zeros(ctx, (4, 4), "cyclic"), mesh),
    lambda: pm.from_dtensor(ctx, distribute_tensor(torch.ones(2, 2, 2), mesh, [Shard(0)])),
):
    try:
        wrong()
    except pm.LayoutError:
        refused += 1
assert refused == 3
if ctx.rank == 0:
    print("same memory", flush=True)
end_at_once()
