"""Groups, and the collectives of arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pgasdl.collectives.allreduce import repeated
from pgasdl.collectives.bound import kind_of, reduction_of
from pgasdl.collectives.handle import Collective
from pgasdl.context.part import Part
from pgasdl.group import Group


class CollectiveCalls(Part):
    """What the ranks of a context do together."""

    def group(self, ranks: Iterable[int], *, timeout: float | None = None) -> Group:
        """Form a group. Collective over its members only.

        Parameters
        ----------
        ranks : Iterable[int]
            The members, including this rank.
        timeout : float, optional
            Seconds; None: the context's default. After a timeout the same call continues.

        Raises
        ------
        RankError
            No such rank, a rank twice, or this rank is missing.
        PgasTimeoutError
            Names the rank that has not called it.
        PeerLostError
            A member is gone.

        Notes
        -----
        GASPI: gaspi_group_create, gaspi_group_add, gaspi_group_commit.
        """
        members = tuple(sorted(ranks))
        self._require_usable()
        for member in members:
            self._require_peer(member, "group")
        core = self._job.form(self, members, self._seconds(timeout))
        return Group(self, self.topology, core, self._drop)

    def _drop(self, group: Group) -> None:
        """Give up the memory of a group that was deleted."""
        self._allreduces.drop(group)
        self._arrays.drop(group)
        self.state.drop(group)
        self._pool.drop(group)

    def barrier(self, *, timeout: float | None = None) -> None:
        """``world.barrier``: wait until every rank is here."""
        self.world.barrier(timeout=timeout)

    @repeated
    def allreduce(
        self,
        array: Any,
        op: str = "sum",
        *,
        group: Group | None = None,
        plan: str | None = None,
        timeout: float | None = None,
        stream: object = None,
    ) -> Any:
        """Replace every rank's array by the sum of all, or another reduction. Collective.

        Parameters
        ----------
        array : array_like
            Contiguous and writable, same size and dtype on all ranks: array, tensor, or a segment
            slice (float32). float32, float64, float16, bfloat16, int32, int64.
        op : str, default "sum"
            "sum", "mean" (of floating point numbers), "min", "max" or "prod"; the last three on the
            host alone. min and max are NaN where some rank has NaN.
        group : Group, optional
            None: all ranks.
        plan : str, optional
            Name of an algorithm; None: chosen by size.
        timeout : float, optional
            Seconds; None: the context's default.
        stream : object, optional
            For an array on a GPU: the stream that orders the call. The call begins when the stream
            has done its earlier work, and later work of the stream comes after the result.
            The stream makes it, and the call does not wait, unless the array is copied to the host
            for it or lies in the pool. None: PyTorch's or CuPy's current stream.

        Returns
        -------
        object
            ``array``, with the same bits on every rank and in every run.

        Raises
        ------
        BufferRefusedError
            Strided, read-only, or a dtype that is not reduced.
        MismatchError
            A rank is in another collective, or came with another size or dtype.
        PeerLostError, PgasTimeoutError

        Notes
        -----
        Plans and handles are kept, so the first call with a size costs more. Arrays inside segments
        or the pool are reduced in place; others pass through a workspace. An array in a segment
        must be so on every rank; on a GPU so must one of 4 KB or more in the pool. On the host an
        array outside the pool on one rank, where others have theirs in it, lets all of its size
        pass through the workspace until :meth:`pool` is called again. A handle is fastest:
        :meth:`allreduce_handle`.
        """
        self._allreduces.run(array, op, group or self.world, plan, timeout, stream)
        return array

    def broadcast(
        self, array: Any, root: int = 0, *, group: Group | None = None, timeout: float | None = None
    ) -> Any:
        """Replace every rank's array by that of ``root``. Collective.

        Parameters
        ----------
        array : array_like
            Contiguous and writable memory of the host, same size and dtype on all ranks; any dtype.
        root : int, default 0
            Rank of the job whose array it is; a member of the group.
        group : Group, optional
            None: all ranks.
        timeout : float, optional
            Seconds; None: the context's default. After a timeout the same call continues.

        Returns
        -------
        object
            ``array``.

        Raises
        ------
        BufferRefusedError
            Strided, read-only, or on a GPU.
        RankError
            ``root`` is not a member.
        MismatchError
            A rank is in another collective, or came with another size, dtype or root.
        PeerLostError, PgasTimeoutError

        Notes
        -----
        It copies through a workspace of the group, which the first call of this or of the next two
        makes. Large arrays that are broadcast again and again: ``collective_handle("broadcast")``.
        """
        return self._arrays.broadcast(array, root, group or self.world, timeout)

    def all_gather(
        self,
        array: Any,
        out: Any = None,
        *,
        group: Group | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Return the arrays of all ranks, in the order of the ranks. Collective.

        Parameters
        ----------
        array : array_like
            This rank's: contiguous memory of the host, same size and dtype on all ranks; any dtype.
        out : array_like, optional
            Where the result goes, ``group.size`` times as long; None: a new array.
        group, timeout
            As for :meth:`broadcast`.

        Returns
        -------
        object
            ``out``, or a new array or tensor of shape ``(group.size, *array.shape)``.

        Raises
        ------
        BufferRefusedError, MismatchError, PeerLostError, PgasTimeoutError
            As for :meth:`broadcast`.
        """
        return self._arrays.all_gather(array, out, group or self.world, timeout)

    def reduce_scatter(
        self,
        array: Any,
        op: str = "sum",
        out: Any = None,
        *,
        group: Group | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Return this rank's block of the sum of all ranks' arrays. Collective.

        Parameters
        ----------
        array : array_like
            On the host; the first dimension is a multiple of ``group.size``. Else as for
            :meth:`allreduce`; it is not changed.
        op : str, default "sum"
            As for :meth:`allreduce`.
        out : array_like, optional
            Where the result goes; None: a new array.
        group, timeout
            As for :meth:`broadcast`.

        Returns
        -------
        object
            ``out``, or a new array or tensor: this rank's rows of the reduction, added in the order
            of the ranks.

        Raises
        ------
        BufferRefusedError, MismatchError, PeerLostError, PgasTimeoutError
            As for :meth:`broadcast`.
        """
        return self._arrays.reduce_scatter(array, op, out, group or self.world, timeout)

    def allreduce_handle(
        self,
        array: Any,
        op: str = "sum",
        *,
        group: Group | None = None,
        plan: str | None = None,
        timeout: float | None = None,
        out: Any = None,
        **options: int,
    ) -> Collective:
        """Make a persistent allreduce of one piece of memory. Collective; call it to run it.

        Parameters
        ----------
        array : array_like
            Any array or tensor. One of the pool (:meth:`empty`), or a view of a segment
            (``segment.numpy(np.float32)``), is reduced in place if it is such on every rank,
            wherever it lies there.
        op, group, plan, timeout
            As for :meth:`allreduce`.
        out : array_like, optional
            Where the result goes; None: into ``array``.
        **options : int
            Options of the plan, such as ``chunks=8``.

        Returns
        -------
        Collective
            ``handle()`` runs it; ``handle.start()`` and ``handle.wait()`` overlap it.
        """
        kind, group = kind_of(op), group or self.world
        reduction = reduction_of(op)
        return Collective(self.state, kind, array, out, group, plan, timeout, options, reduction)

    def collective_handle(
        self,
        kind: str,
        array: Any,
        *,
        group: Group | None = None,
        plan: str | None = None,
        timeout: float | None = None,
        out: Any = None,
        **options: int,
    ) -> Collective:
        """Make a persistent collective on one piece of memory. Collective; call it to run it.

        Parameters
        ----------
        kind : str
            The result in the array: "broadcast" (every member has the array of ``root``), "reduce"
            (``root`` has the sum; the others' arrays are undefined), "reduce-scatter" (member r has
            block r of the sum), "all-gather" (every member has block r of each member r),
            "all-to-all" (member r has block r of every member), "sum", "average". Blocks are those
            of :func:`pgasdl.plans.blocks`; those of all-to-all are equal: count div size elements.
        array, out, group, plan, timeout
            As for :meth:`allreduce_handle`.
        **options : int
            Options of the plan, such as ``root=1``.

        Returns
        -------
        Collective
            ``handle()`` runs it; ``handle.start()`` and ``handle.wait()`` overlap it.

        Raises
        ------
        PlanError
            No such kind, or the plan does not offer it.
        BufferRefusedError, MismatchError, PeerLostError, PgasTimeoutError
        """
        return Collective(self.state, kind, array, out, group or self.world, plan, timeout, options)
