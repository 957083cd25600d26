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
"""

from pgasdl.checkpoint.checkpoints import FORMATS, Checkpoints, load
from pgasdl.errors import CheckpointError

__all__ = [
    "FORMATS",
    "CheckpointError",
    "Checkpoints",
    "load",
]
