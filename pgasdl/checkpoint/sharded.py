"""Read a checkpoint that several ranks wrote, in any windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pgasdl.checkpoint.files import reading, require, sha256
from pgasdl.checkpoint.forms import load
from pgasdl.checkpoint.shard import ShardPlace
from pgasdl.checkpoint.spread import INDEX, STATE, places_of, read_index
from pgasdl.checkpoint.state import DTYPES, Array


class Sharded:
    """A checkpoint that several ranks wrote: made by :func:`open_sharded`.

    Attributes
    ----------
    path : Path
        Its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._blocks: dict[str, list[tuple[Path, ShardPlace]]] = {}
        with reading(path / INDEX):
            files = read_index(path)
        for file in files:
            with reading(path / file["file"]):
                if sha256(path / file["file"]) != file["sha256"]:
                    raise ValueError("its SHA-256 is not that of the index")
            for place in places_of(file):
                self._blocks.setdefault(place.name, []).append((path / file["file"], place))

    def state(self) -> dict[str, Any]:
        """Read the state that is the same on all ranks.

        Raises
        ------
        CheckpointError
            Its file cannot be read any more.
        UnavailableError
            It holds tensors, and PyTorch is not installed.
        """
        return load(self.path / STATE)

    def names(self) -> list[str]:
        """Return the names of the matrices, in order."""
        return sorted(self._blocks)

    def shape(self, name: str) -> tuple[int, int]:
        """Return rows and columns of a matrix. Raises KeyError if there is none such."""
        return self._blocks[name][0][1].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype of a matrix. Raises KeyError if there is none such."""
        return DTYPES[self._blocks[name][0][1].dtype]

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Array:
        """Read a window of a matrix, and nothing else of the files.

        Parameters
        ----------
        name : str
            The matrix.
        rows, columns : slice, optional
            The window, as in ``array[rows, columns]``, without steps. All, if left out.

        Returns
        -------
        ndarray
            A new array of the window's shape and the matrix's dtype.

        Raises
        ------
        KeyError
            There is no such matrix.
        ValueError
            A slice has a step.
        CheckpointError
            A file cannot be read any more.
        """
        from safetensors import safe_open

        n_rows, n_columns = self.shape(name)
        row, column = _span(rows, n_rows), _span(columns, n_columns)
        window = np.empty((len(row), len(column)), self.dtype(name))
        for path, place in self._blocks[name]:
            r = _common(row, range(place.row, place.row + place.rows))
            c = _common(column, range(place.column, place.column + place.columns))
            if r and c:
                target = window[_within(r, row.start), _within(c, column.start)]
                with reading(path), safe_open(path, framework="np") as file:
                    block = file.get_slice(place.key)
                    target[:] = block[_within(r, place.row), _within(c, place.column)]
        return window


def _span(window: slice, extent: int) -> range:
    first, last, step = window.indices(extent)
    if step != 1:
        raise ValueError(f"{window}: windows have no steps")
    return range(first, last)


def _common(one: range, other: range) -> range:
    """Return what two ranges share; a range of nothing is false."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _within(part: range, start: int) -> slice:
    """Return a range as a slice of an array that begins at ``start``."""
    return slice(part.start - start, part.stop - start)


def open_sharded(path: str | Path) -> Sharded:
    """Open a checkpoint that :meth:`Checkpoints.save_sharded` wrote, and verify every file of it.

    Parameters
    ----------
    path : str or Path
        Its folder: :meth:`Checkpoints.sharded_path`.

    Raises
    ------
    CheckpointError
        A file is missing, cut or changed; the message names it.
    UnavailableError
        safetensors is not installed.
    """
    path = Path(path)
    require("safetensors", f"reading {path}")
    return Sharded(path)
