"""The forms of a checkpoint that one rank writes, and how each is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pgasdl.checkpoint import dcp_folder, one_file
from pgasdl.checkpoint.files import reading, require
from pgasdl.checkpoint.spread import INDEX
from pgasdl.checkpoint.state import digest, unflatten

FORMS: dict[str, Any] = {"safetensors": one_file, "dcp": dcp_folder}
FORMATS = tuple(FORMS)


def load(path: str | Path) -> dict[str, Any]:
    """Read one checkpoint that :meth:`Checkpoints.save` wrote.

    Parameters
    ----------
    path : str or Path
        A file of format "safetensors", or a folder of format "dcp".

    Raises
    ------
    CheckpointError
        It is damaged, or :meth:`Checkpoints.save` did not write it.
    ValueError
        :meth:`Checkpoints.save_sharded` wrote it.
    UnavailableError
        A package is not installed: safetensors, or PyTorch for tensors and "dcp".
    """
    path = Path(path)
    if (path / INDEX).exists():
        raise ValueError(f"{path} was written by several ranks: open_sharded reads it")
    # A folder's index is a pickle, so none passes for a file of the other format.
    form = dcp_folder if path.is_dir() and path.suffix != ".safetensors" else one_file
    require(form.PACKAGE, f"reading {path}")
    with reading(path):
        leaves, rest, stored = form.read(path)
        if stored != digest(leaves, rest):
            raise ValueError("its SHA-256 is not that of what it holds")
        return unflatten(leaves, rest)
