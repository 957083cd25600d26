"""A folder of checkpoints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pgasdl.checkpoint import spread
from pgasdl.checkpoint.files import finish, reading, require, require_own, require_private, writing
from pgasdl.checkpoint.forms import FORMATS, FORMS, load
from pgasdl.checkpoint.shard import Shard
from pgasdl.checkpoint.sharded import Sharded, open_sharded
from pgasdl.checkpoint.state import flatten
from pgasdl.errors import CheckpointError

T = TypeVar("T")


class Checkpoints:
    """A folder of checkpoints, named by iteration; the last complete one counts.

    Those count that this user or root has written, where no other user can write.

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
        require(FORMS[format].PACKAGE, f"a checkpoint of format {format!r}")
        self.folder, self.format = Path(folder), format

    def path(self, iteration: int) -> Path:
        """Return where :meth:`save` writes the checkpoint of an iteration."""
        return self._path(iteration, self.format)

    def _path(self, iteration: int, suffix: str) -> Path:
        if iteration < 0:
            raise ValueError(f"iteration {iteration}: 0 or more")
        return self.folder / f"{iteration:08d}.{suffix}"

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
            JSON cannot hold a value, or safetensors a dtype.
        ValueError
            Two arrays or tensors have one place: ``{"a.b": x, "a": {"b": y}}``, the format needs it
            (``"__metadata__"``), or the iteration is negative.
        CheckpointError
            Another user can write to the folder, so :meth:`load_last` would refuse it.
        OSError
            The disk is full, say; the checkpoints before stay as they are.
        """
        path = self.path(iteration)
        leaves, rest = flatten(state)
        with writing(path) as partial:
            FORMS[self.format].write(partial, leaves, rest)
            finish(partial, path)

    def load_last(self) -> dict[str, Any] | None:
        """Read the last checkpoint that is complete, of any format; None if there is none at all.

        It passes over damaged ones and other users', each with a line to standard error.

        Raises
        ------
        CheckpointError
            There is no other, or :meth:`save_sharded` wrote them; or another user can write to the
            folder.
        OSError, MemoryError
            It cannot be read, and may be whole: no rank goes back for that alone.
        UnavailableError
            The checkpoint holds tensors, and PyTorch is not installed.
        """
        return self._last(FORMATS, load)

    # --- written by several ranks

    def sharded_path(self, iteration: int) -> Path:
        """Return the folder that :meth:`save_sharded` writes for an iteration."""
        return self._path(iteration, "sharded")

    def save_sharded(
        self,
        iteration: int,
        state: dict[str, Any],
        shards: Iterable[Shard],
        gather: Callable[[bytes], list[bytes]],
    ) -> None:
        """Write a checkpoint together with other ranks. Collective.

        It has its name only once all files are complete on the disk, and then on all ranks.

        Parameters
        ----------
        iteration : int
            0 <= iteration; a sharded checkpoint of the same iteration is replaced.
        state : dict
            All else, as for :meth:`save`; the first rank's is stored.
        shards : iterable of Shard
            This rank's blocks; there may be none.
        gather : function
            Returns every rank's bytes, in the order of the ranks, as
            ``lambda blob: ctx.world.allgather("checkpoint", blob, timeout)`` does. It is called
            four times; one of them waits for the rank that writes longest.

        Raises
        ------
        CheckpointError
            A rank could not write, the ranks have different folders, which others can write to, or
            the blocks do not cover each element once. All ranks raise it; the checkpoints before
            stay as they are.
        UnavailableError
            safetensors is not installed.
        """
        require("safetensors", "a sharded checkpoint")
        spread.write(self.sharded_path(iteration), state, shards, gather)

    def open_last(self) -> Sharded | None:
        """Open the last sharded checkpoint that is complete; None if there is none at all.

        It passes over others, and raises, as :meth:`load_last` does.
        """
        return self._last(("sharded",), open_sharded)

    def _last(self, suffixes: tuple[str, ...], read: Callable[[Path], T]) -> T | None:
        def order(path: Path) -> tuple[int, bool, int]:
            return int(path.stem), path.suffix[1:] == self.format, -len(path.stem)

        names: list[str] = []
        with suppress(FileNotFoundError):
            names = os.listdir(self.folder)
        found = [each for each in map(self.folder.joinpath, names) if each.stem.isdecimal()]
        paths = [each for each in found if each.suffix[1:] in suffixes]
        if not paths:
            if not any(each.suffix[1:] in (*FORMATS, "sharded") for each in found):
                return None
            call = "load_last() reads" if "sharded" in suffixes else "open_last() opens"
            raise CheckpointError(f"{self.folder} has only checkpoints that {call}")
        require_private(self.folder)
        for path in sorted(paths, key=order, reverse=True):
            try:
                with reading(path):
                    require_own(path)
                return read(path)
            except CheckpointError as error:
                print(f"{error}; going back to the one before it", file=sys.stderr, flush=True)
        raise CheckpointError(f"every checkpoint in {self.folder} is damaged, or another user's")
