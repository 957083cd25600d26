"""Checkpoints: a folder of them, each written whole or not at all, and checked when it is read.

::

    checkpoints = Checkpoints("checkpoints")
    found = checkpoints.load_last()  # on every rank
    ...
    if ctx.rank == 0:
        checkpoints.save(iteration, {"weights": weights, "iteration": iteration})

A state is dictionaries and lists with NumPy arrays and tensors in them, such as ``state_dict()``
methods return. One rank writes it; every rank reads it, also on another number of ranks. PyTorch is
needed for tensors and for format "dcp" alone.

Matrices that are spread over ranks are written by all of them, each its own blocks, and read in
any windows, so that ranks may divide them in another way::

    shards = [Shard("weights", (1000, 64), row=first, column=0, array=mine)]
    checkpoints.save_sharded(
        iteration, {"iteration": iteration}, shards,
        gather=lambda blob: ctx.world.allgather("checkpoint", blob),
    )
    ...
    found = checkpoints.open_last()
    mine = found.read("weights", rows=slice(first, last))
"""

from pgasdl.checkpoint.checkpoints import Checkpoints
from pgasdl.checkpoint.forms import FORMATS, load
from pgasdl.checkpoint.shard import Shard
from pgasdl.checkpoint.sharded import Sharded, open_sharded
from pgasdl.errors import CheckpointError

__all__ = [
    "FORMATS",
    "CheckpointError",
    "Checkpoints",
    "Shard",
    "Sharded",
    "load",
    "open_sharded",
]
