"""PyTorch's DTensor and distributed matrices: the same memory, where the layouts are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pgasdl.buffers import memory_of
from pgasdl.errors import LayoutError
from pgasdl.group import Group
from pgasdl.matrix.array import DistributedArray, make
from pgasdl.matrix.layout import Layout, columns, replicated, rows
from pgasdl.matrix.space import Space, space_of

if TYPE_CHECKING:
    from pgasdl.context import Context


def from_dtensor(where: Context | Group, dtensor: Any) -> Any:
    """Return the matrix or vector that a DTensor is. They share their memory.

    Parameters
    ----------
    where : Context or Group
        The ranks of its mesh, in the same order.
    dtensor : torch.distributed.tensor.DTensor
        On the host, of one or two dimensions, on a mesh of one; sharded over either, or replicated.

    Raises
    ------
    LayoutError
        Another placement, or a mesh of other ranks.
    BufferRefusedError
        This rank's part is not contiguous or not on the host, or of a dtype that matrices do not
        have.
    """
    space = space_of(where)
    shape = tuple(dtensor.shape)
    _require_ranks(dtensor.device_mesh, space)
    if len(shape) not in (1, 2):
        raise LayoutError(f"a DTensor of shape {shape}: matrices have two dimensions, vectors one")
    whole = (*shape, 1)[:2]
    layout = _layouts(whole, space.group.size).get(dtensor.placements[0])
    if layout is None:
        raise LayoutError(f"no layout is like {dtensor.placements[0]} of shape {shape}")
    memory = memory_of(dtensor.to_local().detach())
    flat = memory.on_host().view(memory.dtype)
    if flat.size != layout.count(space.rank):
        raise LayoutError(f"{flat.size} elements here, where {layout} has another number")
    return make(len(shape), space, layout, memory.dtype, flat)


def to_dtensor(array: DistributedArray, mesh: Any) -> Any:
    """Return the DTensor that a matrix or vector is. They share their memory.

    Parameters
    ----------
    array : DistributedMatrix or DistributedVector
        In layout "rows", "columns" or "replicated", over all ranks of its group.
    mesh : torch.distributed.DeviceMesh
        Of one dimension, with the ranks of the group in their order.

    Raises
    ------
    LayoutError
        Another layout, which :meth:`DistributedMatrix.remap` changes, or a mesh of other ranks.
    """
    import torch
    from torch.distributed.tensor import DTensor

    space = array.space
    _require_ranks(mesh, space)
    layouts = _layouts(array.layout.shape, space.group.size)
    placement = next((p for p, layout in layouts.items() if layout == array.layout), None)
    if placement is None:
        raise LayoutError(f"DTensor has nothing like {array.layout}: remap it to rows or columns")
    cut = 1 if placement.is_shard(1) else 0
    here = [*array.shape]
    if placement.is_shard():
        here[cut] = sum(block.rows if cut == 0 else block.columns for block, _ in array.blocks())
    name = array.dtype.name
    local = torch.empty(here, dtype=getattr(torch, name))
    if array.flat.size:
        local = torch.from_numpy(array.flat.view(np.uint8)).view(local.dtype).reshape(here)
    stride = (array.shape[1], 1)[-array.ndim :] if array.ndim == 2 else (1,)
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=torch.Size(array.shape), stride=stride
    )


def _require_ranks(mesh: Any, space: Space) -> None:
    if mesh.ndim != 1 or mesh.size() != space.group.size or mesh.get_local_rank() != space.rank:
        raise LayoutError(f"{mesh} has not the ranks of {space.group}, in their order")


def _layouts(shape: tuple[int, int], size: int) -> dict[Any, Layout]:
    """Return the layouts that are like a placement."""
    from torch.distributed.tensor import Replicate, Shard

    found = {Shard(0): rows(shape, range(size)), Replicate(): replicated(shape, range(size))}
    if shape[1] > 1:
        found[Shard(1)] = columns(shape, range(size))
    return found
