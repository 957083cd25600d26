"""Write records into striped files."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from pgasdl.input.stripes import Index, StripeFile, check_dtype, header, read_header


class StripedWriter:
    """Make striped files; use it in a ``with`` statement, and :meth:`append` records.

    The index is written at the end, in one piece: a set without index is incomplete. Leaving the
    ``with`` block by an exception removes what was written.

    Parameters
    ----------
    index : str or Path
        Where the index goes. Neither it nor the files may exist.
    dtype : dtype
        The dtype of a record: ``[("image", "u1", (3, 224, 224)), ("label", "i8")]``. Packed fields
        of fixed size, in what NumPy's own dtypes offer.
    files : int or sequence of paths
        Where the records go: paths, relative to the index's folder, one for each disk; or a number
        of files beside the index.
    stripe : int
        Records in a row that go into one file, at least 1. swCaffe has 256 MB.

    Raises
    ------
    ValueError
        A dtype, stripe or number that is not possible.
    FileExistsError
        A file is there.

    Notes
    -----
    The files are NumPy's (``.npy``) and can be opened without this class: ``numpy.load``.
    """

    def __init__(
        self,
        index: str | os.PathLike[str],
        dtype: npt.DTypeLike,
        *,
        files: int | Sequence[str | os.PathLike[str]],
        stripe: int,
    ) -> None:
        self._path = Path(index).absolute()
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        names = self._names(files)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"files {names}: at least one, and none twice")
        if stripe < 1:
            raise ValueError(f"stripe {stripe}: at least 1 record")
        self._require_dtype()
        if self._path.exists():
            raise FileExistsError(f"{self._path} is there")
        self._relative, self._stripe = names, stripe
        self._crcs = [0] * len(names)
        self._n_records = 0
        self._files: list[BinaryIO] = []
        try:
            for name in names:
                self._files.append((self._path.parent / name).open("xb"))
                self._files[-1].write(header(self.dtype, 0))
        except BaseException:
            self.abandon()
            raise

    def append(self, records: Any) -> None:
        """Write some records behind those that are there.

        Parameters
        ----------
        records : array or dict[str, array]
            Records of the writer's dtype; or an array for each field, with the record as first
            axis. A field takes other dtypes of its kind (``numpy.can_cast``, "same_kind") and any
            integers, as far as the values fit: floats may be rounded, all else stays as it is.

        Raises
        ------
        ValueError
            Fields are missing, or of other shapes or kinds; or a value does not fit.
        """
        array = self._packed(records)
        done = 0
        while done < len(array):
            block, within = divmod(self._n_records, self._stripe)
            number = block % len(self._files)
            part = array[done : done + self._stripe - within]
            words = part.view(np.uint8).data
            self._files[number].write(words)
            self._crcs[number] = zlib.crc32(words, self._crcs[number])
            done += len(part)
            self._n_records += len(part)

    def close(self) -> None:
        """Complete the files, then write the index. Idempotent."""
        if not self._files:
            return
        files = tuple(map(StripeFile, self._relative, self._crcs))
        index = Index(self._n_records, self._stripe, files)
        for number, file in enumerate(self._files):
            file.seek(0)
            file.write(header(self.dtype, index.count(number)))
            file.flush()
            os.fsync(file.fileno())
        for file in self._files:
            file.close()
        self._files.clear()
        new = self._path.with_name(self._path.name + ".new")
        new.unlink(missing_ok=True)  # of one that died; a link of somebody else's is not followed
        with new.open("x", encoding="utf-8") as writing:
            writing.write(index.text())
        new.replace(self._path)

    def abandon(self) -> None:
        """Remove what was written, unless the set is complete."""
        for file in self._files:
            file.close()
            os.unlink(file.name)
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def _names(self, files: int | Sequence[str | os.PathLike[str]]) -> list[str]:
        if isinstance(files, int):
            return [f"{self._path.stem}-{number:03d}.npy" for number in range(files)]
        return [os.fspath(name) for name in files]

    def _require_dtype(self) -> None:
        """Raise ValueError unless the files will say the dtype as it is."""
        check_dtype(self.dtype)
        read, _ = read_header(io.BytesIO(header(self.dtype, 0)))
        if read != self.dtype:
            raise ValueError(f"dtype {self.dtype} would be read as {read}: it is not NumPy's own")

    def _packed(self, records: Any) -> npt.NDArray[Any]:
        """Return records as one contiguous array."""
        if not isinstance(records, Mapping):
            array = np.ascontiguousarray(records)
            if array.dtype != self.dtype or array.ndim != 1:
                raise ValueError(
                    f"{array.dtype} of shape {array.shape}: wanted one axis of {self.dtype}"
                )
            return array
        names = self.dtype.names or ()
        arrays = {name: np.asarray(array) for name, array in records.items()}
        lengths = {array.shape[:1] for array in arrays.values()}
        if set(arrays) != set(names) or len(lengths) != 1 or () in lengths:
            raise ValueError(
                f"fields {sorted(arrays)}: wanted {sorted(names)}, with as many records in each"
            )
        packed = np.empty(len(arrays[names[0]]), self.dtype)
        for name in names:
            if arrays[name].shape != packed[name].shape:
                raise ValueError(f"{name}: shape {arrays[name].shape}, wanted {packed[name].shape}")
            packed[name] = _cast(arrays[name], packed[name].dtype, name)
        return packed


def _cast(array: npt.NDArray[Any], dtype: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    """Return an array of this dtype, with the values of ``array``."""
    if array.size == 0 or np.can_cast(array.dtype, dtype, "equiv"):
        return array.astype(dtype, copy=False)
    integers = array.dtype.kind in "iu" and dtype.kind in "iu"
    if not integers and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(f"{name}: {array.dtype} is not of the kind of {dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
        if integers:
            limits = np.iinfo(dtype)
            fits = limits.min <= int(array.min()) and int(array.max()) <= limits.max
        elif array.dtype.kind in "fc":
            fits = not (np.isfinite(array) & ~np.isfinite(cast)).any()
        else:
            fits = cast.astype(array.dtype).tobytes() == array.tobytes()
    if not fits:
        raise ValueError(f"{name}: values of {array.dtype} do not fit into {dtype}")
    return cast
