"""Format "dcp": a folder of ``torch.distributed.checkpoint``, which other programs read by that.

One process writes it, and each reads it. PyTorch's module takes a second to import.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pgasdl.checkpoint.state import Leaves, array_of, arrays_of, digest, tensor_of

PACKAGE = "torch"
_TEXTS = ("pgasdl.rest", "pgasdl.sha256")  # tensors beside the state's


def write(path: Path, leaves: Leaves, rest: str) -> None:
    """Write a folder."""
    from torch.distributed.checkpoint.state_dict_saver import save

    arrays = arrays_of(rest)
    tensors = {name: tensor_of(leaf) if name in arrays else leaf for name, leaf in leaves.items()}
    texts = zip(_TEXTS, map(_tensor_of, (rest, digest(leaves, rest))), strict=True)
    with _alone():
        save({**tensors, **dict(texts)}, checkpoint_id=path, no_dist=True)


def read(path: Path) -> tuple[Leaves, str, str]:
    """Return what a folder holds: arrays and tensors, all the rest, and the SHA-256 of both."""
    import torch
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(path)
    metadata: Any = reader.read_metadata()
    leaves: Leaves = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in metadata.state_dict_metadata.items()
    }
    try:
        with _alone():
            load(leaves, storage_reader=reader, no_dist=True)
    except CheckpointException as error:  # not an Exception to Python
        raise ValueError(str(error)) from error
    rest, stored = (bytes(leaves.pop(name).tolist()).decode() for name in _TEXTS)
    for name in arrays_of(rest):
        leaves[name] = array_of(leaves[name])
    return leaves, rest, stored


@contextmanager
def _alone() -> Iterator[None]:
    """Silence PyTorch's warning that it works without other processes, as is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _tensor_of(text: str) -> Any:
    import torch

    return torch.tensor(list(text.encode()), dtype=torch.uint8)
