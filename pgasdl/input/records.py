"""A data set: records of any size, in files of well-known formats, read through levels."""

from __future__ import annotations

import functools
import json
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pgasdl.errors import DataError, PgasError
from pgasdl.group import Group
from pgasdl.input.batches import Batches
from pgasdl.input.files import File, Files
from pgasdl.input.formats import FORMATS, Table, format_of
from pgasdl.input.index import packed, unpacked
from pgasdl.input.levels import BLOCK, BytesRead, Levels
from pgasdl.input.next_use import NextUse
from pgasdl.input.storage import Storage
from pgasdl.input.threads import at_once

Remote = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_TABLES = "input tables"
_STAGERS = 4  # threads
_MEMORY = 256 << 20  # bytes, where storage is not a file system


class Records:
    """Records of a data set in storage, as dictionaries of their fields; threads may share it.

    ``records[i]`` is record i: of a sample in webdataset's tars its parts by extension, as bytes,
    and ``"__key__"``; of a file in a folder the same, and its folder's number as ``"cls"``; of a
    row in Parquet files its columns; of NumPy's arrays their elements. What decodes them is a
    function of the user (:class:`Loader`).

    Bytes are read in blocks of 4 MiB by three levels: the memory of the job's ranks, a folder on
    a local disk, and storage. A block is loaded by one rank, and read from its memory by the
    others with one-sided reads.

    Parameters
    ----------
    remote : str, Path, or a sequence of those
        Files, folders, patterns (``*.tar``, ``train-{0000..0146}.tar``), or URLs of those that
        fsspec opens (``https://``, ``s3://``). The order is that of records.
    format : str, optional
        "tar", "folder", "parquet" or "npy"; None: by the names.
    local : str or Path, optional
        The folder of the disk's level; ranks and jobs share it. None: no such level. Files are
        known by name, size, and the time or tag that storage tells. What another user could have
        written there is not read; a folder that cannot be written serves what it has.
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
        A file is missing or damaged, or storage fails, after it was tried several times.
    ValueError
        No such format, or files of several.
    UnavailableError
        A library is missing.

    Notes
    -----
    A rank that dies takes its memory with it: the others read its blocks from the levels below.
    MiMatrix (3.4) has these three levels, and S-Caffe (4.1) a reader in each process.
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
        self._group = group if group is not None and group.size > 1 else None
        self._again = functools.partial(
            Records, format=format, local=local, cache_limit=cache_limit, memory=0, timeout=timeout
        )
        self._remote = remote
        self._timeout = timeout
        self._storage = Storage(timeout=timeout)
        self.files = Files([File(*each) for each in json.loads(self._told_by_one(remote))])
        self.format = format or format_of(self.files)
        if memory is None:
            direct = local is None and "://" not in self.files[0].url
            memory = 0 if direct else _MEMORY
        self._levels = Levels(
            self.files,
            self._storage,
            local=local,
            limit=cache_limit,
            memory=memory,
            group=self._group,
            timeout=timeout,
        )
        try:
            self._form = FORMATS[self.format](self.files, self._tables(memory))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._form)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return a record.

        Raises
        ------
        IndexError
            There is none of this number.
        DataError
            It is damaged, or storage fails; names file and offset.
        """
        number = operator.index(row)
        if not 0 <= number < len(self):
            raise IndexError(f"record {number}: there are {len(self)}, from 0")
        return self._form.record(number, self._levels.read)

    def place(self, row: int) -> str:
        """Return the file of a record, and where it begins there."""
        ranges = self._form.ranges(row)
        return self.files.place(ranges[0][0]) if ranges else f"record {row}, of no bytes"

    def announce(self, rows: Iterable[int]) -> None:
        """Say that records will be read soon, in the order of their use."""
        self._levels.announce(part for row in rows for part in self._form.ranges(int(row)))

    def follow(self, batches: Batches) -> NextUse:
        """Tell the levels the order in which records are read: what is used last gives way first.

        Whoever reads keeps ``iteration`` of the answer up to date.
        """
        order = NextUse(batches, *self._bounds)
        self._levels.follow(order)
        return order

    @property
    def chunks(self) -> npt.NDArray[np.int64]:
        """The block in which each record begins, or its row group: they are read together."""
        return self._bounds[0] if self.format != "parquet" else self._form.bounds()[0]

    @property
    def mix(self) -> int | None:
        """How many chunks are kept decoded, and a :class:`Loader` mixes if not told; None: all."""
        return getattr(self._form, "mix", None)

    def counters(self) -> BytesRead:
        """Return the bytes that this rank has read so far, by level."""
        return self._levels.counters()

    def stage(self) -> int:
        """Bring this rank's part of the data set, without a group all, to the local disk.

        Returns
        -------
        int
            The bytes of it that are there now: fewer than all if the disk, or its limit, is full.
        """
        rank, size = (self._group.rank, self._group.size) if self._group else (0, 1)
        blocks = range(rank, self._levels.n_blocks, size)
        with ThreadPoolExecutor(_STAGERS, "pgasdl-stage") as pool:
            for _ in pool.map(self._levels.stage, blocks):
                pass
        return self._levels.staged(blocks)

    def close(self) -> None:
        """Close files, and give up this rank's memory. Idempotent."""
        self._levels.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., Records], tuple[Remote]]:
        return self._again, (self._remote,)  # without memory: for the worker of a DataLoader

    @functools.cached_property
    def _bounds(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the first and the last block of each record."""
        begins, nbytes = self._form.bounds()
        return begins // BLOCK, (begins + np.maximum(nbytes, 1) - 1) // BLOCK

    # --- what all ranks must know

    def _told_by_one(self, remote: Remote) -> bytes:
        """Find the files: the first rank does, and all get its answer or its error."""

        def find() -> bytes:
            found = self._storage.find(remote)
            return json.dumps([(file.url, file.nbytes, file.version) for file in found]).encode()

        return self._shared("input files", find if self._first else None)[0]

    def _tables(self, memory: int) -> list[Table]:
        """Return what each file's records are: each rank looks at its part of the files."""
        form, rank, size = FORMATS[self.format], 0, 1
        if self._group is not None:
            rank, size = self._group.rank, self._group.size
        levels, number = self._levels, list(FORMATS).index(self.format)
        what = f"input index, {memory} bytes"
        known = self._shared(what, (lambda: levels.index(number)) if self._first else None)[0]
        if known:
            return unpacked([known], len(self.files))

        def scan() -> bytes:
            mine = range(rank, len(self.files), size)
            found = at_once(lambda k: form.scan(self.files, k, levels.read), mine)
            return packed(dict(zip(mine, found, strict=True)))

        tables = unpacked(self._shared(_TABLES, scan), len(self.files))
        if self._first:
            levels.keep_index(number, packed(dict(enumerate(tables))))
        return tables

    @property
    def _first(self) -> bool:
        return self._group is None or self._group.rank == 0

    def _shared(self, what: str, make: Callable[[], bytes] | None) -> list[bytes]:
        """Return what each rank made; if one failed, all fail."""
        if self._group is None:
            return [make() if make else b""]
        try:
            blob, error = b"+" + (make() if make else b""), None
        except (PgasError, OSError, ValueError, ImportError) as caught:
            blob, error = b"-" + str(caught).encode(), caught
        # Others may still read: a second for each MB is more than any storage needs.
        seconds = self._timeout + (self.files.nbytes / 1e6 if what == _TABLES else 0)
        blobs = self._group.allgather(what, blob, seconds)
        if error is not None:
            raise error
        for rank, each in enumerate(blobs):
            if each.startswith(b"-"):
                raise DataError(f"rank {self._group.ranks[rank]}: {each[1:].decode()}")
        return [each[1:] for each in blobs]
