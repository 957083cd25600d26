"""``pgasdl.torch.ddp_hook``: DistributedDataParallel averages its buckets through pgasdl.

No ``from __future__ import annotations`` here: DistributedDataParallel compares the annotations of
a hook with classes.
"""

import atexit
import math
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, distributed
from torch.futures import Future

from pgasdl.context import Context
from pgasdl.errors import ClosedError
from pgasdl.group import Group
from pgasdl.torch.work import GroupWork
from pgasdl.torch.work_queue import WorkQueue

_open: "weakref.WeakSet[DDPState]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End all threads: one that is in PyTorch when Python ends would end the process by abort()."""
    for state in list(_open):
        state.close()


class DDPState:
    """The state that :func:`ddp_hook` needs: it averages buckets, one after the other. Collective.

    A thread does it for buckets on the host, a stream for those on a GPU. A callback of a bucket's
    future may wait for the future of another one: the next bucket has a thread all the same.

    Every model has its own. Buckets may lie anywhere, and elsewhere on every rank and in every
    iteration: DistributedDataParallel makes new ones after the first, and in ``join``.

    Parameters
    ----------
    context : Context
        The context of this rank.
    group : Group, optional
        The ranks of the model; None: all.
    timeout : float, optional
        Seconds for each bucket; None: the context's default.

    Raises
    ------
    PgasTimeoutError, PeerLostError, MismatchError
    """

    def __init__(
        self, context: Context, group: Group | None = None, timeout: float | None = None
    ) -> None:
        # Its own sequence of allreduces, in which no other thread makes one.
        own = context.group((group or context.world).ranks, timeout=timeout)
        self._group: Group | None = own
        self._seconds = context._seconds(timeout)
        self._queue = WorkQueue("pgasdl-ddp")

        def average(bucket: Tensor) -> None:
            context.allreduce(bucket, op="mean", group=own, timeout=timeout)

        self._average: Callable[[Tensor], None] | None = average
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._finalizer = weakref.finalize(self, self._queue.close, 0, 0)
        _open.add(self)

    def average(self, bucket: Tensor) -> "Future[Tensor]":
        """Begin to average ``bucket`` in place; returns at once."""
        if not self._finalizer.alive:
            raise ClosedError("this DDPState was closed")
        if bucket.is_cuda:
            return self._average_on_gpu(bucket)
        average = self._average
        assert average is not None  # not closed
        work = self._queue.run(GroupWork([bucket]), lambda: average(bucket), later=True)
        return work.get_future().then(lambda done: done.value()[0])

    def _average_on_gpu(self, bucket: Tensor) -> "Future[Tensor]":
        """Let a stream of ours do it: those of the program go on."""
        stream = self._streams.get(bucket.device)
        if stream is None:
            stream = torch.cuda.Stream(bucket.device, priority=-1)  # type: ignore[no-untyped-call]
            self._streams[bucket.device] = stream
        stream.wait_stream(torch.cuda.current_stream(bucket.device))
        bucket.record_stream(stream)
        future: Future[Tensor] = Future(devices=[bucket.device])
        assert self._average is not None  # not closed
        with torch.cuda.stream(stream):
            self._average(bucket)
            future.set_result(bucket)  # a wait for the future waits for the stream
        return future

    def close(self) -> None:
        """End the thread, after the calls that it has begun, and free its group. Idempotent."""
        self._finalizer()
        self._queue.close(math.inf, self._seconds)
        own, self._group, self._average = self._group, None, None
        if own is not None and not own.context.closed:
            own.delete()


def ddp_hook(
    state: DDPState,
    bucket: distributed.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of DistributedDataParallel through pgasdl.

    Parameters
    ----------
    state : DDPState
        The state of this model.
    bucket : GradBucket
        On the host or a GPU, of a dtype that can be averaged.

    Returns
    -------
    Future
        The averaged bucket: the same memory. The bits are the same on every rank.

    Notes
    -----
    ``model.register_comm_hook(pgasdl.torch.DDPState(context), pgasdl.torch.ddp_hook)``. The mean is
    over all ranks, also in ``join``: as with ``divide_by_initial_world_size=True``, the default.
    Where a bucket is not averaged, ``backward`` raises a RuntimeError that tells why.
    """
    return state.average(bucket.buffer())
