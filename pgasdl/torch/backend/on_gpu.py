"""Collectives and messages of tensors on a GPU: the same ones, made with copies on the host.

A call whose first tensor is on a GPU is made with copies (:func:`takes_gpus`). In the queue of
the group's collectives the host waits for the copies right before it: the caller of an asynchronous
one does not wait, and the order is that of the calls. The sender of a message waits.
``Work.wait()`` waits for the host's part, and lets the then current stream wait for the results'
copies.

Sums and means need no copies where peers reach the GPU's memory: a stream of the group's makes them
(:func:`all_reduced`), and the host's part is to enqueue them in their order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from pgasdl.torch.backend.arguments import (
    contiguous,
    listed,
    on_device,
    on_several,
    options_of,
    require_unshared,
)
from pgasdl.torch.backend.copies import HostCopies
from pgasdl.torch.backend.reductions import reduction_of
from pgasdl.torch.backend.work import Together
from pgasdl.torch.work import GroupWork, Promise, Result

_LISTS = (list, tuple)


class GpuWork(GroupWork):
    """A call with tensors on a GPU; ``on_host`` is the same call with their copies."""

    def __init__(self, result: Result, on_host: GroupWork, copies: HostCopies) -> None:
        super().__init__(result)
        self._on_host, self.copies = on_host, copies

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the host's part, and let the current stream wait for the rest."""
        self._on_host.wait(timeout)
        self.copies.wait_here()
        return True

    def is_completed(self) -> bool:
        """Whether it is over, on the GPU, too."""
        if not self._on_host.is_completed():
            return False
        return self.exception() is not None or bool(self.copies.bring_back().query())

    def is_success(self) -> bool:
        """Whether it is over and did not fail."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return what made it fail."""
        return self._on_host.exception()

    def source_rank(self) -> int:
        """Return who sent it, as a place in the group."""
        rank: int = self._on_host.source_rank()
        return rank

    _source_rank = source_rank

    def get_future(self) -> Future[Result]:
        """Return a future of the result's tensors, for which streams wait."""
        with self._lock:
            if self._promise is not None:
                return self._promise.future
            promise = self._promise = Promise(self.copies.future())
        self._on_host.get_future().add_done_callback(lambda _: self.complete())
        return promise.future

    def complete(self) -> None:
        """Complete the future, behind the way back."""
        assert self._promise is not None
        error = self.exception()
        try:
            self.copies.bring_back()
        except Exception as failed:
            error = error or failed
        with self.copies.on_stream():  # it records an event there
            self._promise.settle(self._result if error is None else error)


class GpuTogether(Together):
    """Several calls as one, the last one with tensors on a GPU."""

    def get_future(self) -> Future[Result]:
        """Return a future of the results' tensors, for which streams wait."""
        last, futures = self._works[-1], [work.get_future() for work in self._works]
        assert isinstance(last, GpuWork)
        promise = Promise(last.copies.future())

        def complete(_: object) -> None:
            with last.copies.on_stream():  # it waits for all of them
                try:
                    outcome: Any = [tensor for each in futures for tensor in each.wait()]
                except Exception as error:
                    outcome = error
                promise.settle(outcome)

        torch.futures.collect_all(futures).add_done_callback(complete)
        return promise.future


def together(works: list[GroupWork]) -> Together:
    """Return several calls as one."""
    return (GpuTogether if works and isinstance(works[-1], GpuWork) else Together)(works)


def all_reduced(group: Any, tensors: list[Tensor], options: Any) -> GroupWork | None:
    """Let a stream reduce tensors on a GPU over all ranks; None: it needs copies on the host."""
    given = [on_device(each) for each in tensors]
    device, collectives = _device_of(given), group._collectives
    reductions = [reduction_of(options.reduceOp, each.dtype) for each in given]
    if not all(collectives.streams(each, device) for each in reductions):
        return None
    for each in given:
        require_unshared(each)
    seconds, copies = group._seconds(options), HostCopies(device, collectives.stream(device))

    def call() -> None:
        read_only = any(tensor.is_inference() for tensor in given)
        with copies.on_stream(), torch.inference_mode(read_only):
            for tensor, reduction in zip(given, reductions, strict=True):
                memory = contiguous(tensor)
                collectives.enqueue_all_reduce(reduction.numbers(memory), reduction, seconds)
                if memory is not tensor:
                    tensor.copy_(memory)

    for each in given:
        copies.keep(each)
    later = options.asyncOp or group._coalesced is not None
    group._work_queue.run(GroupWork([]), call, later=later)
    work = group._work_queue.run(GroupWork([]), copies.bring_back, later=later)
    made: GroupWork = group._begun(GpuWork(tensors, work, copies))
    return made


def takes_gpus(
    *,
    reads: str | None = None,
    writes: str | None = None,
    at_once: bool = False,
    reduces: type | None = None,
) -> Callable[[Callable[..., GroupWork]], Callable[..., GroupWork]]:
    """Let a method of a process group take tensors on a GPU, too.

    All tensors of a call are on one device, which the first one tells; the method refuses others.

    ``reads`` and ``writes`` name the parameters with tensors; a tensor that is wholly written is
    not read. ``at_once``: the method does not queue its call (messages). ``reduces``: the type of
    an all_reduce's options, where a stream makes it if it can.
    """
    asked = [name for name in dict.fromkeys((writes, reads)) if name is not None]

    def decorate(method: Callable[..., GroupWork]) -> Callable[..., GroupWork]:
        signature = inspect.signature(method)
        places = [(list(signature.parameters).index(name) - 1, name) for name in asked]

        @functools.wraps(method)
        def call(group: Any, *given: Any, **named: Any) -> GroupWork:
            for at, name in places:
                first = given[at] if at < len(given) else named.get(name)
                while first.__class__ in _LISTS and first:
                    first = first[0]
                if isinstance(first, Tensor):  # else nothing is given or taken here
                    break
            if not isinstance(first, Tensor) or first.is_cpu or first.device.type != "cuda":
                return method(group, *given, **named)
            bound = signature.bind(group, *given, **named)
            if reduces is not None:
                has = bound.arguments.get
                options = options_of(reduces, has("opts"), "reduceOp", has("timeout"))
                work = all_reduced(group, listed(has("tensors")), options)
                if work is not None:
                    return work
            return _by_host(group, method, bound, asked, reads, writes, at_once)

        return call

    return decorate


def _by_host(
    group: Any,
    method: Callable[..., GroupWork],
    bound: inspect.BoundArguments,
    names: list[str],
    reads: str | None,
    writes: str | None,
    at_once: bool,
) -> GroupWork:
    """Make a call with copies of its tensors."""
    result = list(_leaves(bound.arguments[names[0]]))
    given = {name: _each(bound.arguments[name], on_device) for name in names}
    if writes:
        for each in _leaves(given[writes]):
            require_unshared(each)
    copies = HostCopies(_device_of(given.values()))
    for name in names:
        make = functools.partial(copies.make, reads=name == reads, writes=name == writes)
        bound.arguments[name] = _each(given[name], make)
    copies.begin()
    if at_once:
        if reads:
            copies.arrive()
        work = method(*bound.args, **bound.kwargs)
    else:
        # Three calls of the queue, one behind the other; what fails ends those behind it.
        later = group._coalesced is not None or getattr(
            bound.arguments.get("opts"), "asyncOp", True
        )
        group._work_queue.run(GroupWork([]), copies.arrive, later=later)
        method(*bound.args, **bound.kwargs)
        work = group._work_queue.run(GroupWork([]), copies.bring_back, later=later)
    made = GpuWork(result, work, copies)
    if group._coalesced is not None:
        group._coalesced[-1] = made  # instead of the copies'
    return made


def _each(tensors: Any, call: Callable[[Tensor], Tensor]) -> Any:
    """Return the same lists with what ``call`` makes of each tensor."""
    return call(tensors) if isinstance(tensors, Tensor) else [_each(each, call) for each in tensors]


def _leaves(tensors: Any) -> Iterator[Tensor]:
    if isinstance(tensors, Tensor):
        yield tensors
    else:
        for each in tensors:
            yield from _leaves(each)


def _device_of(tensors: Any) -> torch.device:
    """Return where all tensors are."""
    devices = {each.device for each in _leaves(tensors)}
    if len(devices) > 1:
        raise on_several(map(str, devices))
    return devices.pop()
