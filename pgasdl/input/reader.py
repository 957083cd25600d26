"""Read records of striped files."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pgasdl.errors import DataError
from pgasdl.input.descriptors import Descriptor
from pgasdl.input.stripes import StripeFile, read_header, read_index


class StripedFiles:
    """Records of equal size, of one or more fields, in several files; threads may share it.

    ``files[i]`` is record i, a dict with an array for each field. ``files[rows]`` is a batch: a
    dict of arrays with the record as first axis; ``rows`` are numbers, or a mask of ``len(files)``
    booleans. So it is a data set of a DataLoader; each of its workers reads for itself.

    Parameters
    ----------
    index : str or Path
        The file that a :class:`StripedWriter` made; the others are found from there.

    Attributes
    ----------
    dtype : dtype
        The dtype of a record, with its fields.

    Raises
    ------
    DataError
        A file is missing, damaged, cut, or of another set.
    OSError
        The index cannot be read.

    Notes
    -----
    Opening reads headers only; :meth:`verify` reads all. A batch's reads are announced to the
    kernel, then each record is read by preadv into its place: no memory is mapped, so a file that
    is cut while it is in use raises DataError and kills nobody.
    """

    def __init__(self, index: str | os.PathLike[str]) -> None:
        self._path = Path(index).absolute()
        self._index = read_index(self._path)
        self._descriptors: list[Descriptor] = []
        self._offsets: list[int] = []
        try:
            dtypes = [self._open(number) for number in range(len(self._index.files))]
        except BaseException:
            self.close()
            raise
        self.dtype = dtypes[0]
        for file, dtype in zip(self._index.files, dtypes, strict=True):
            if dtype != self.dtype:
                self.close()
                raise DataError(
                    f"{self._at(file)} has records of {dtype}, and "
                    f"{self._at(self._index.files[0])} of {self.dtype}"
                )

    def __len__(self) -> int:
        return self._index.n_records

    def __getitem__(self, rows: Any) -> dict[str, npt.NDArray[Any]]:
        """Return a record, or the batch of several, in new memory."""
        if np.ndim(rows) == 0:
            return {name: array[0] for name, array in self[[self._checked(rows)]].items()}
        rows = self._numbers(rows)
        out = {
            name: np.empty((len(rows), *field.shape), field.base)
            for name, field in fields(self.dtype).items()
        }
        self.read(rows, out)
        return out

    def read(self, rows: Any, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Read records into given memory.

        Parameters
        ----------
        rows : sequence of int, or mask
            The records, 0 <= each < ``len(files)``; repeated ones are fine. Or ``len(files)``
            booleans: those where it is True.
        out : dict[str, array]
            A contiguous array for each field, with the record as first axis.

        Raises
        ------
        IndexError
            No such record, or a mask of another length.
        ValueError
            An array does not fit.
        DataError
            A file ended early.
        """
        rows = self._numbers(rows)
        targets = self._targets(out, len(rows))
        self.announce(rows)
        for number, (file, start) in enumerate(map(self._start, rows)):
            views = [memory[number * size : (number + 1) * size] for memory, size in targets]
            if not self._descriptors[file].fill(start, *views):
                path = self._at(self._index.files[file])
                raise DataError(f"{path} ended before record {rows[number]}: it has been cut")

    def announce(self, rows: Any) -> None:
        """Let the kernel fetch records that will be read soon."""
        nbytes = self.dtype.itemsize
        for file, start in map(self._start, self._numbers(rows)):
            self._descriptors[file].announce(start, nbytes)

    def place(self, row: int) -> str:
        """Return the file of a record, and where it begins there."""
        file, start = self._start(self._checked(row))
        return f"{self._at(self._index.files[file])}, byte {start}"

    def verify(self) -> None:
        """Read everything and compare it with the checksums.

        Raises
        ------
        DataError
            A file is damaged, or is another one than the writer's.
        """
        for number, file in enumerate(self._index.files):
            start = self._offsets[number]
            end = start + self._index.count(number) * self.dtype.itemsize
            crc = self._descriptors[number].crc32(start, end)
            if crc is None:
                raise DataError(f"{self._at(file)} ended early: it has been cut")
            if crc != file.crc32:
                raise DataError(f"{self._at(file)} does not have the records that were written")

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._descriptors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[Self], tuple[Path]]:
        return type(self), (self._path,)

    def _start(self, row: int) -> tuple[int, int]:
        """Return the file of a record, and its first byte there."""
        file, place = self._index.place(row)
        return file, self._offsets[file] + place * self.dtype.itemsize

    def _at(self, file: StripeFile) -> Path:
        return self._path.parent / file.path

    def _open(self, number: int) -> np.dtype[Any]:
        """Open a file, check it, and return the dtype of its records."""
        path = self._at(self._index.files[number])
        if not path.is_file():  # a pipe would wait for a writer
            raise DataError(f"{self._path} names {path}, which is no file")
        try:
            descriptor = Descriptor(os.fspath(path))
            with open(descriptor.number, "rb", closefd=False) as file:
                dtype, count = read_header(file)
                self._offsets.append(file.tell())
            self._descriptors.append(descriptor)
        except OSError as error:
            raise DataError(f"{self._path} names {path}: {error}") from error
        except ValueError as error:
            raise DataError(f"{path} is no file of records: {error}") from error
        wanted = self._index.count(number)
        if count != wanted:
            raise DataError(f"{path} has {count} records; by {self._path} it has {wanted}")
        end = self._offsets[number] + count * dtype.itemsize
        if descriptor.nbytes != end:
            raise DataError(f"{path} has {descriptor.nbytes} bytes; {count} records end at {end}")
        return dtype

    def _numbers(self, rows: Any) -> list[int]:
        """Return the numbers of records that are named by numbers or by a mask."""
        mask = np.asarray(rows)
        if mask.dtype == bool:
            if mask.shape != (len(self),):
                raise IndexError(f"a mask of shape {mask.shape}: there are {len(self)} records")
            rows = np.flatnonzero(mask)
        return [self._checked(row) for row in rows]

    def _checked(self, row: Any) -> int:
        if isinstance(row, bool):  # Python's are integers
            raise TypeError(f"record {row}: wanted a number, or a mask of all records")
        number = operator.index(row)
        if not 0 <= number < len(self):
            raise IndexError(f"record {number}: there are {len(self)}, from 0")
        if not self._descriptors:
            raise ValueError("the files are closed")
        return number

    def _targets(
        self, out: Mapping[str, npt.NDArray[Any]], n_rows: int
    ) -> list[tuple[memoryview, int]]:
        """Return each field's memory, and the bytes of one record in it."""
        targets = []
        for name, field in fields(self.dtype).items():
            array = out[name]
            if array.shape != (n_rows, *field.shape) or array.dtype != field.base:
                raise ValueError(
                    f"{name}: {array.dtype} of shape {array.shape}, wanted {field.base} of shape "
                    f"{(n_rows, *field.shape)}"
                )
            if not (array.flags.c_contiguous and array.flags.writeable):
                raise ValueError(f"{name}: the array is strided or read-only")
            targets.append((array.reshape(-1).view(np.uint8).data, field.itemsize))
        return targets


def fields(dtype: np.dtype[Any]) -> dict[str, np.dtype[Any]]:
    """Return the dtype of each field, with the shape that it has in one record."""
    return {name: dtype.fields[name][0] for name in dtype.names or () if dtype.fields}
