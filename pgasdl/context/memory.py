"""Segments, memory of others made a segment, and the pool of arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from pgasdl import _native
from pgasdl.buffers import memory_of
from pgasdl.context.part import Part
from pgasdl.device.names import ordinal_of
from pgasdl.group import Group
from pgasdl.segment import Segment


class MemoryCalls(Part):
    """What a context makes of memory."""

    @property
    def takes_devices(self) -> bool:
        """Whether peers reach segments on the first GPU, and PGASDL_GPU allows it.

        By shared memory they do, by verbs where the adapter reaches the GPU's memory. Else such
        segments have notifications, and their arrays take part in collectives, by way of the host;
        but nobody writes to them or reads from them.
        """
        return not _native.cuda_missing() and not self._why_unreached(0)

    def segment(
        self,
        nbytes: int,
        *,
        device: object = "cpu",
        notifications: int | None = None,
        group: Group | None = None,
        timeout: float | None = None,
    ) -> Segment:
        """Create memory that every member of a group can write to. Collective.

        Parameters
        ----------
        nbytes : int
            Size of this rank's copy, 0 <= nbytes; ranks may differ. Zero-filled, page-aligned.
        device : str, torch.device or cupy.cuda.Device, default "cpu"
            Where this rank's copy lies: "cpu"; a GPU as in "cuda:1"; "cuda": the current one of
            PyTorch or CuPy.
        notifications : int, optional
            Number for this rank's copy; None: ``limits.notifications``.
        group : Group, optional
            None: all ranks.
        timeout : float, optional
            Seconds; None: the context's default. After a timeout the same call continues.

        Raises
        ------
        PgasTimeoutError
            Names the ranks that have not called it.
        MismatchError
            A rank is in another collective.
        SegmentError, NotificationError
            Impossible sizes.
        ConfigError
            The name of no device.
        UnavailableError
            A device that is not available.

        Notes
        -----
        Where peers do not reach a GPU (:attr:`takes_devices`), a segment there has notifications,
        which the host waits for, and its arrays take part in collectives; what would write to its
        memory or read from it raises UnavailableError.
        It is a sealed memfd without a name in any file system: kill -9 leaves nothing behind.
        Where peers do not map it (verbs), it lives until it is deleted, because this rank cannot
        know when they are done.
        GASPI: gaspi_segment_create.
        """
        ordinal = ordinal_of(device)
        number = self.config.notifications if notifications is None else notifications
        return self.segments.make(group or self.world, nbytes, number, timeout, ordinal)

    def bind(
        self,
        buffer: object,
        *,
        notifications: int | None = None,
        group: Group | None = None,
        timeout: float | None = None,
    ) -> Segment:
        """Make memory allocated elsewhere a segment. Collective.

        Parameters
        ----------
        buffer : object
            Contiguous and writable: array, tensor, anything with the buffer protocol; on a GPU a
            tensor, a CuPy array, anything with ``__cuda_array_interface__`` or DLPack. The segment
            and its views keep it alive, and a ``bytearray`` or the like cannot be resized meanwhile
            (BufferError).
        notifications, group, timeout
            As for :meth:`segment`.

        Raises
        ------
        BufferRefusedError
            Strided, read-only, or no memory.
        UnavailableError
            A peer may not reach this process's memory; raised on first use.

        Notes
        -----
        Peers reach it by process_vm_writev and process_vm_readv (shm), not by loads and stores:
        plans that need mapped memory refuse it. Where Yama restricts these calls (ptrace_scope 1),
        the first bind admits other processes to this one's memory: its only peer, or the common
        launcher and everything that it started. Ranks without a common launcher admit every
        process of their user, and log it.
        GASPI: gaspi_segment_bind, gaspi_segment_use.
        """
        memory = memory_of(buffer, device=True)
        number = self.config.notifications if notifications is None else notifications
        return self.segments.bind(group or self.world, memory, number, timeout)

    def pool(
        self,
        nbytes: int,
        *,
        device: object = "cpu",
        group: Group | None = None,
        timeout: float | None = None,
    ) -> None:
        """Make the pool of arrays, or add to it. Collective.

        From then on :meth:`empty`, :meth:`zeros` and :meth:`empty_like` cut arrays from it, each
        rank by itself. :meth:`allreduce`, from 4 KB on, and persistent handles reduce them in
        place, wherever they lie on other ranks.

        Parameters
        ----------
        nbytes : int
            Size of this rank's new segment, 0 <= nbytes; ranks may differ. No array spans two.
        device : str, torch.device or cupy.cuda.Device, default "cpu"
            Where this rank's new segment lies; as for :meth:`segment`.
        group : Group, optional
            The members have it; None: all ranks. Arrays for groups within it are cut from it.
        timeout : float, optional
            Seconds; None: the context's default. After a timeout the same call continues.

        Raises
        ------
        PgasTimeoutError
            Names the ranks that have not called it.
        MismatchError
            A rank is in another collective.
        SegmentError
            An impossible size.
        ConfigError
            The name of no device.
        UnavailableError
            A device that is not available.

        Notes
        -----
        :meth:`describe` says how much is free.
        dMath: persistent memory, registered once.
        """
        self._pool.grow(nbytes, ordinal_of(device), timeout, group)

    def empty(
        self,
        shape: int | Iterable[int],
        dtype: Any = np.float32,
        *,
        device: object = "cpu",
        group: Group | None = None,
    ) -> Any:
        """Cut an array from the pool. Local; any thread may call it.

        Parameters
        ----------
        shape : int or Iterable[int]
            As for ``numpy.empty``.
        dtype : dtype, default np.float32
            NumPy's, "bfloat16", or PyTorch's: then it is a tensor.
        device : str, torch.device or cupy.cuda.Device, default "cpu"
            Where it is to lie; the pool has memory there.
        group : Group, optional
            The group whose collectives find it in place; None: all ranks.

        Returns
        -------
        ndarray, Tensor or, on a GPU, cupy.ndarray
            It is not initialized, and aligned to 64 bytes. The memory is used again when the array
            and all its views are gone. After :meth:`close` it is memory of this rank alone.

        Raises
        ------
        PoolFullError
            No free block is so long, or there is no pool: all ranks call :meth:`pool`.
        BufferRefusedError
            A negative size, or a dtype of Python objects.
        ConfigError, UnavailableError
            The name of no device, or of one that is not available.
        """
        self._require_usable()
        return self._pool.empty(shape, dtype, ordinal_of(device), group)

    def zeros(
        self,
        shape: int | Iterable[int],
        dtype: Any = np.float32,
        *,
        device: object = "cpu",
        group: Group | None = None,
    ) -> Any:
        """Cut an array of zeros from the pool. Local; as :meth:`empty`."""
        array = self.empty(shape, dtype, device=device, group=group)
        array[...] = 0
        return array

    def empty_like(self, array: Any) -> Any:
        """Cut one of the same shape, dtype and device from the pool: a tensor for a tensor.

        Local; as :meth:`empty`.
        """
        self._require_usable()
        return self._pool.empty_like(array)

    @property
    def mapped(self) -> bool:
        """Whether every rank can load from and store to every other's segments."""
        return self.world.mapped
