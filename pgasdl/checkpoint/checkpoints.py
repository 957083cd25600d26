"""A folder of checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pgasdl.checkpoint import dcp_folder, one_file
from pgasdl.checkpoint.files import begin, finish, reading, require
from pgasdl.checkpoint.state import digest, flatten, unflatten
from pgasdl.errors import CheckpointError

_FORMS: dict[str, Any] = {"safetensors": one_file, "dcp": dcp_folder}
FORMATS = tuple(_FORMS)

T = TypeVar("T")


class Checkpoints:
    """A folder of checkpoints, named by iteration; the last complete one counts.

    Parameters
    ----------
    folder : str or Path
        Made when the first checkpoint is written. The same for all ranks.
    format : str, default "safetensors"
        The form of :meth:`save`. "safetensors": one file without any pickle. "dcp": a folder of
        ``torch.distributed.checkpoint``, which other programs read by that.

    Raises
    ------
    ValueError
        No such format.
    UnavailableError
        The format's package is not installed: safetensors or PyTorch.
    """

    def __init__(self, folder: str | Path, format: str = "safetensors") -> None:
        if format not in FORMATS:
            raise ValueError(f"format {format!r}: there are {', '.join(FORMATS)}")
        require(_FORMS[format].PACKAGE, f"a checkpoint of format {format!r}")
        self.folder, self.format = Path(folder), format

    def path(self, iteration: int) -> Path:
        """Return where :meth:`save` writes the checkpoint of an iteration."""
        return self.folder / f"{iteration:08d}.{self.format}"

    def save(self, iteration: int, state: dict[str, Any]) -> None:
        """Write a checkpoint. It has its name only once it is complete on the disk.

        Parameters
        ----------
        iteration : int
            0 <= iteration; a checkpoint of the same iteration is replaced.
        state : dict
            Dictionaries, lists and tuples with NumPy arrays, tensors and what JSON holds in them.
            Tensors come back on the host, tuples as lists, all else as it was.

        Raises
        ------
        TypeError
            JSON cannot hold a value, or safetensors an array's dtype.
        ValueError
            Two arrays or tensors have one place: ``{"a.b": x, "a": {"b": y}}``.
        OSError
            The disk is full, say; the checkpoints before stay as they are.
        """
        leaves, rest = flatten(state)
        path = self.path(iteration)
        _FORMS[self.format].write(begin(path), leaves, rest)
        finish(path)

    def load_last(self) -> dict[str, Any] | None:
        """Read the last checkpoint that is complete; None if there is none at all.

        It passes over damaged ones, each with a line to standard error.

        Raises
        ------
        CheckpointError
            Every checkpoint is damaged.
        UnavailableError
            The checkpoint holds tensors, and PyTorch is not installed.
        """
        return self._last(self.format, load)

    def _last(self, suffix: str, read: Callable[[Path], T]) -> T | None:
        paths = sorted(self.folder.glob(f"*.{suffix}"), reverse=True)
        for path in paths:
            try:
                return read(path)
            except CheckpointError as error:
                print(f"{error}; going back to the one before it", file=sys.stderr, flush=True)
        if paths:
            raise CheckpointError(f"every checkpoint in {self.folder} is damaged")
        return None


def load(path: str | Path) -> dict[str, Any]:
    """Read one checkpoint that :meth:`Checkpoints.save` wrote.

    Parameters
    ----------
    path : str or Path
        A file of format "safetensors", or a folder of format "dcp".

    Raises
    ------
    CheckpointError
        It is damaged or cannot be read.
    UnavailableError
        What it needs is not installed: safetensors, or PyTorch for tensors and "dcp".
    """
    path = Path(path)
    form = dcp_folder if path.is_dir() else one_file
    require(form.PACKAGE, f"reading {path}")
    with reading(path):
        leaves, rest, stored = form.read(path)
        if stored != digest(leaves, rest):
            raise ValueError("its SHA-256 is not that of what it holds")
        return unflatten(leaves, rest)
