"""A data set: records of any size, in files of well-known formats, read through levels."""

from __future__ import annotations

import functools
import json
import operator
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pgasdl.group import Group
from pgasdl.input.batches import Batches, InOrder
from pgasdl.input.files import File, Files, Remote, names_of
from pgasdl.input.formats import FORMATS, Format, format_of
from pgasdl.input.formats.arrays import Arrays
from pgasdl.input.index import Index, Readers
from pgasdl.input.levels import BytesRead, Levels
from pgasdl.input.nearby import Nearby, Range
from pgasdl.input.next_use import NextUse
from pgasdl.input.storage import Storage
from pgasdl.input.threads import at_once

_MEMORY = 256 << 20  # bytes, where storage is not a file system


class Records:
    """Records of a data set in storage, as dictionaries of their fields; threads may share it.

    ``records[i]`` is record i. A sample of webdataset's tars has its parts by extension, as bytes,
    and ``"__key__"``. A file in a folder has the same, and its folder's number as ``"cls"``: that
    among the folders which are there (a log line has them), so each set needs the same ones; in
    several folders those of one name have one number. A row of Parquet files has its columns, and
    an element of NumPy's arrays its fields. A function of the user decodes them (:class:`Loader`).

    Records of NumPy's arrays have one size and need no function: ``records[rows]`` is a batch, a
    dict of arrays with the record as first axis, and :meth:`read` fills arrays that are there.

    Bytes are read in blocks of 4 MiB by three levels: the memory of the job's ranks, a folder on
    a local disk, and storage. A block is loaded by one rank, and read from its memory by the
    others with one-sided reads.

    Parameters
    ----------
    remote : str, Path, or a sequence of those, the same on all ranks
        Files, folders, patterns (``*.tar``, ``train-{0000..0146}.tar``), or URLs of those that
        fsspec opens (``https://``, ``s3://``). The order is that of records.
    format : str, optional
        "tar", "folder", "parquet" or "npy"; None: by the names.
    local : str or Path, optional
        The folder of the disk's level; ranks and jobs share it. None: no such level. Files are
        known by name, size, and the time or tag that storage reports. Blocks that another user
        could have written are not read. A folder that cannot be written serves the blocks it has.
        It is not in a folder of the data set, unless hidden there.
    cache_limit : int, optional
        Most bytes in ``local``; None: as many as there are.
    memory : int, optional
        Bytes of this rank's share of the memory's level, the same on all ranks. None: 256 MiB if
        ``remote`` is a URL, or with ``local``; else 0. 0: every read goes to the level below.
    group : Group, optional
        The ranks that read the data set together: a collective. None: this process alone.
    timeout : float, default 60
        Seconds to wait for storage (each try) and for another rank.

    Raises
    ------
    DataError
        A file is missing or damaged, or storage fails, after it was tried several times. Of tars
        the first records only are looked at; the others are when one of them, or the number of
        records, is wanted.
    ValueError
        No such format, or files of several; a name of no character.
    TypeError
        ``remote`` is a set or an iterator, whose order may be another one each time.
    MismatchError
        The ranks gave other names, formats or memories.
    UnavailableError
        A library is missing.

    Notes
    -----
    A rank that dies takes its memory with it: the others read its blocks from the levels below.
    MiMatrix (2.1) has these three levels, and S-Caffe (4.1) a reader in each process.
    """

    def __init__(
        self,
        remote: Remote,
        *,
        format: str | None = None,
        local: str | os.PathLike[str] | None = None,
        cache_limit: int | None = None,
        memory: int | None = None,
        group: Group | None = None,
        timeout: float = 60.0,
    ) -> None:
        if format is not None and format not in FORMATS:
            raise ValueError(f"format {format!r}: there are {', '.join(FORMATS)}")
        self.group = group
        self._members = Readers(group, timeout)
        self._again = functools.partial(
            Records, format=format, local=local, cache_limit=cache_limit, memory=0, timeout=timeout
        )
        self._remote = names_of(remote)
        self._storage = Storage(timeout=timeout)
        given = f"input, format {format}, {self._remote}"  # others see its beginning
        what = f"{given:.200}, {zlib.crc32(given.encode()):08x}"
        found = self._members.from_first(what, self._found)
        self.files = Files([File(*each) for each in json.loads(found)])
        self.format = format or format_of(self.files)
        cache = "" if local is None else os.path.join(os.path.abspath(local), "")
        for root in {each.url[: each.root] for each in self.files if cache} - {""}:
            if cache.startswith(root) and "/." not in cache[len(root) - 1 :]:
                raise ValueError(f"local={cache} is in {root}: its blocks would be records")
        if memory is None:
            direct = local is None and "://" not in self.files[0].url
            memory = 0 if direct else _MEMORY
        self._levels = Levels(
            self.files,
            self._storage,
            local=local,
            limit=cache_limit,
            memory=memory,
            group=self._members.group,
            timeout=timeout,
        )
        try:
            self._index = Index(self.files, self.format, self._levels, self._members, memory)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._index.all)

    def __getitem__(self, row: Any) -> dict[str, Any]:
        """Return a record; of NumPy's files several, by their numbers.

        Raises
        ------
        IndexError
            There is none of this number.
        DataError
            It is damaged, or storage fails; names file and offset.
        """
        try:
            number = operator.index(row)
        except TypeError:
            if isinstance(form := self._index.known, Arrays):
                return form.batch(row, self._levels.fill)
            told = f"{row!r:.40}: one record of format {self.format} at a time"
            raise TypeError(f"{told}; a DataLoader takes batches as batch_sampler") from None
        form = self._index.having(number + 1)
        if not 0 <= number < len(form):
            raise IndexError(f"record {number}: there are {len(self)}, from 0")
        return form.record(number, self._levels.read)

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The fields of each record of NumPy's files; None: they have to be decoded."""
        return form.dtype if isinstance(form := self._index.known, Arrays) else None

    def read(self, rows: npt.ArrayLike, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Read records of NumPy's files into given memory.

        Parameters
        ----------
        rows : sequence of int
            The records, 0 <= each < ``len(records)``; repeated ones are fine.
        out : dict[str, array]
            An array for each field of ``dtype``, with the record as first axis.

        Raises
        ------
        IndexError
            There is no record of this number.
        TypeError
            The format has records that must be decoded, or ``rows`` are no numbers.
        ValueError
            An array does not fit.
        DataError
            A file was cut or changed, or storage fails.
        """
        if not isinstance(form := self._index.known, Arrays):
            raise TypeError(f"records of format {self.format} have to be decoded: use a Loader")
        form.fill(rows, out, self._levels.fill)

    def index_together(self) -> None:
        """Find all records now, each rank of the group a part of them. Collective.

        Without it a rank that wants the number of records in tars reads all headers by itself.
        """
        self._index.together()

    def reaches(self, count: int) -> bool:
        """Whether there are so many records.

        While the index of tars is not complete, this reads the headers of so many records only.
        """
        return len(self._index.having(count)) >= count

    def place(self, row: int) -> str:
        """Return the file of a record, and where it begins there."""
        ranges = self._index.having(row + 1).ranges(row)
        return self.files.place(ranges[0][0]) if ranges else f"record {row}, of no bytes"

    def announce(self, rows: Iterable[int]) -> None:
        """Say that records will be read soon, in the order of their use."""
        numbers = np.asarray([*rows], np.int64)
        form = self._index.having(int(max(numbers, default=0)) + 1)
        self._levels.announce(_ranges(form, numbers))

    def nearby(self, rows: npt.NDArray[np.int64]) -> Callable[[int], dict[str, Any]]:
        """Return a function of one of some records, which reads small neighbours at once.

        One thread calls it.
        """
        form = self._index.having(int(max(rows, default=0)) + 1)
        read = Nearby(_ranges(form, rows), self._levels.read)
        return lambda row: form.record(row, read)

    def follow(self, batches: Batches | InOrder) -> NextUse:
        """Give the levels the order of records; they evict the block whose next use is last.

        The caller keeps ``iteration`` of the answer up to date.
        """
        order = NextUse(batches, lambda: None if self._index.known is None else self._index.blocks)
        self._levels.follow(order)
        return order

    @property
    def chunks(self) -> npt.NDArray[np.int64]:
        """The block in which each record begins, or its row group: they are read together."""
        return self._index.blocks[0] if self.format != "parquet" else self._index.all.bounds()[0]

    @property
    def mix(self) -> int | None:
        """The chunks that are kept decoded, the default of ``Loader(mix=...)``; None: all."""
        return getattr(self._index.all, "mix", None)

    def counters(self) -> BytesRead:
        """Return the bytes that this rank has read so far, by level."""
        return self._levels.counters()

    def stage(self) -> int:
        """Bring this rank's part of the data set, without a group all, to the folder ``local``.

        Returns
        -------
        int
            The bytes of it that are there now: fewer than all if the disk, or its limit, is full.
        """
        blocks = range(self._members.rank, self._levels.n_blocks, self._members.size)
        at_once(self._levels.stage, blocks)
        return self._levels.staged(blocks)

    def close(self) -> None:
        """Close files, and free this rank's memory. Idempotent."""
        self._levels.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., Records], tuple[Remote]]:
        return self._again, (self._remote,)  # without memory: for the worker of a DataLoader

    def _found(self) -> bytes:
        """Return the files that ``remote`` names, as JSON."""
        try:
            found = self._storage.find(self._remote)
        except BaseException:
            self._storage.close()  # ends the tries of threads
            raise
        return json.dumps([(f.url, f.nbytes, f.version, f.root) for f in found]).encode()


def _ranges(form: Format, rows: npt.NDArray[np.int64]) -> Iterator[Range]:
    """Yield where some records lie, without those of no bytes."""
    begins, nbytes = form.bounds(rows)
    return ((at, n) for at, n in zip(begins.tolist(), nbytes.tolist(), strict=True) if n)
