"""The collectives and messages of torch.distributed: their arguments, and what a call then does.

A call checks and prepares its arguments at once; the group's queue runs the rest in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from pgasdl.torch.backend import sparse
from pgasdl.torch.backend.arguments import (
    contiguous,
    give_back,
    in_memory,
    listed,
    message_of,
    nested,
    options_of,
    readable,
    require_alike,
    writable,
)
from pgasdl.torch.backend.collectives import (
    Collectives,
    block_of,
    blocks_of,
    bytes_of,
    cut,
    rows,
)
from pgasdl.torch.backend.message import Message
from pgasdl.torch.backend.messages import Messages
from pgasdl.torch.backend.on_gpu import takes_gpus, together
from pgasdl.torch.backend.reductions import reduction_of
from pgasdl.torch.backend.work import MessageWork
from pgasdl.torch.untraced import Untraced
from pgasdl.torch.work import GroupWork, Result, seconds_of, torch_errors
from pgasdl.torch.work_queue import WorkQueue

# PyTorch's stubs do not agree with the calls that it makes.
c10d: Any = distributed.distributed_c10d


class Operations(Untraced):
    """The operations of a process group on tensors; :class:`ProcessGroup` has the rest."""

    _rank: int
    _size: int
    _n_calls: int
    _timeout: float
    _collectives: Collectives
    _messages: Messages
    _work_queue: WorkQueue
    _coalesced: list[GroupWork] | None
    _server: threading.Thread | None

    # --- all ranks get the same

    @takes_gpus(writes="tensors", reads="tensors", reduces=c10d.AllreduceOptions)
    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> GroupWork:
        """Reduce a tensor over all ranks, in place."""
        options = options_of(c10d.AllreduceOptions, opts, "reduceOp", timeout)
        return self._all_reduced(listed(tensors), options)

    @takes_gpus(writes="tensors", reads="tensors", reduces=c10d.AllreduceCoalescedOptions)
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> GroupWork:
        """Reduce several tensors over all ranks, in place."""
        options = options_of(c10d.AllreduceCoalescedOptions, opts, "reduceOp")
        return self._all_reduced(tensors, options)

    def _all_reduced(self, tensors: list[Tensor], options: Any) -> GroupWork:
        steps = [self._reduced(each, options) for each in tensors]

        def call() -> None:
            for step in steps:
                step()

        return self._begin(tensors, options, call)

    def _reduced(self, tensor: Tensor, options: Any) -> Callable[[], None]:
        """Return what reduces one tensor over all ranks."""
        op, seconds = options.reduceOp, self._seconds(options)
        if tensor.is_sparse:
            sparse.require_summable(tensor, op)
            return lambda: sparse.add_up(self._collectives, tensor, self._size, seconds)
        reduction = reduction_of(op, tensor.dtype)
        (result,) = writable([tensor])

        def call() -> None:
            memory = contiguous(result)
            self._collectives.all_reduce(reduction.numbers(memory), reduction, seconds)
            if memory is not result:
                result.copy_(memory)

        return call

    @takes_gpus(writes="tensors", reads="tensors")
    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> GroupWork:
        """Give every rank the tensor of one."""
        options = options_of(c10d.BroadcastOptions, opts, "rootRank", timeout)
        tensors, seconds = listed(tensors), self._seconds(options)
        root = self._require_member(options.rootRank)
        results = writable(tensors)

        def call() -> None:
            memory = in_memory(results)
            for each in memory:
                self._collectives.broadcast(each, root, seconds)
            give_back(memory, results)

        return self._begin(tensors, options, call)

    @takes_gpus(writes="outputs", reads="tensors")
    def allgather(
        self, outputs: Any, tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> GroupWork:
        """Give every rank all ranks' tensors, as a list."""
        options = options_of(c10d.AllgatherOptions, opts, None, timeout)
        tensors, outputs = listed(tensors), nested(outputs)
        return self._gather_all(outputs, tensors, options)

    @takes_gpus(writes="outputs", reads="tensors")
    def allgather_coalesced(
        self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None
    ) -> GroupWork:
        """Give every rank all ranks' lists of tensors, by rank."""
        options = options_of(c10d.AllgatherOptions, opts)
        by_tensor = [list(each) for each in zip(*outputs, strict=True)]
        return self._gather_all(by_tensor, tensors, options)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> GroupWork:
        """Give every rank all ranks' tensors, one behind the other."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single

    @takes_gpus(writes="outputs", reads="tensors")
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> GroupWork:
        """Give every rank all ranks' tensors, one behind the other, for several tensors."""
        options = options_of(c10d.AllgatherOptions, opts)
        seconds = self._seconds(options)
        results, given = writable(outputs), readable(tensors)
        for output, tensor in zip(results, given, strict=True):
            require_alike(tensor, [output], tensor.numel() * self._size)

        def call() -> None:
            memory = in_memory(results)
            for whole, tensor in zip(memory, in_memory(given), strict=True):
                into, owner = rows(whole, self._size), (whole, tensor)
                self._collectives.all_gather(into, block_of(tensor), owner, seconds)
            give_back(memory, results)

        return self._begin(outputs, options, call)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_all(
        self, outputs: list[list[Tensor]], tensors: list[Tensor], options: Any
    ) -> GroupWork:
        seconds = self._seconds(options)
        results, given = [writable(parts) for parts in outputs], readable(tensors)
        for parts, tensor in zip(results, given, strict=True):
            self._require_one_each(parts)
            require_alike(tensor, parts, tensor.numel())

        def call() -> None:
            for parts, tensor in zip(results, given, strict=True):
                memory, mine = in_memory(parts), contiguous(tensor)
                into, owner = blocks_of(memory), (memory, mine)
                self._collectives.all_gather(into, block_of(mine), owner, seconds)
                give_back(memory, parts)

        return self._begin([each for parts in outputs for each in parts], options, call)

    # --- one rank gets something

    @takes_gpus(writes="tensors", reads="tensors")
    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None
    ) -> GroupWork:
        """Reduce a tensor over all ranks, in place, on one of them."""
        options = options_of(c10d.ReduceOptions, opts, "rootRank", timeout)
        if op is not None:
            options.reduceOp = op
        tensors, seconds = listed(tensors), self._seconds(options)
        root = self._require_member(options.rootRank)
        reductions = [reduction_of(options.reduceOp, each.dtype) for each in tensors]
        results = writable(tensors)

        def call() -> None:
            memory = in_memory(results)
            for each, reduction in zip(memory, reductions, strict=True):
                self._collectives.reduce(reduction.numbers(each), root, reduction, seconds)
            give_back(memory, results)

        return self._begin(tensors, options, call)

    @takes_gpus(writes="outputs", reads="tensors")
    def gather(
        self, outputs: Any, tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> GroupWork:
        """Give one rank all ranks' tensors."""
        options = options_of(c10d.GatherOptions, opts, "rootRank", timeout)
        (tensor,), seconds = readable(listed(tensors)), self._seconds(options)
        root = self._require_member(options.rootRank)
        parts: list[Tensor] = []
        if self._rank == root:
            (parts,) = nested(outputs)
        results = writable(parts)
        if self._rank == root:
            self._require_one_each(parts)
            require_alike(tensor, results, tensor.numel())

        def call() -> None:
            memory, mine = in_memory(results), contiguous(tensor)
            into, owner = blocks_of(memory), (memory, mine)
            self._collectives.gather(into, block_of(mine), root, owner, seconds)
            give_back(memory, results)

        return self._begin(parts, options, call)

    def gather_single(self, output: Tensor | None, tensor: Tensor, opts: Any = None) -> GroupWork:
        """Give one rank all ranks' tensors, one behind the other; ``output`` counts there alone."""
        options = options_of(c10d.GatherOptions, opts, "rootRank")
        if self._rank != options.rootRank:
            return self.gather([], [tensor], options)
        if output is None or not output.dim() or len(output) % self._size:
            shape = None if output is None else list(output.shape)
            raise ValueError(f"output of shape {shape}: give {self._size} times n rows")
        return self.gather([list(output.chunk(self._size))], [tensor], options)

    gather_into_tensor = gather_single

    @takes_gpus(writes="outputs", reads="tensors")
    def scatter(
        self, outputs: Any, tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> GroupWork:
        """Give every rank its tensor of those that one rank has."""
        options = options_of(c10d.ScatterOptions, opts, "rootRank", timeout)
        outputs, seconds = listed(outputs), self._seconds(options)
        root = self._require_member(options.rootRank)
        (result,) = results = writable(outputs)
        given: list[Tensor] = []
        if self._rank == root:
            (parts,) = nested(tensors)
            given = readable(parts)
            self._require_one_each(given)
            require_alike(result, given, result.numel())

        def call() -> None:
            memory, parts = in_memory(results), in_memory(given)
            into, owner = blocks_of(memory), (memory, parts)
            self._collectives.scatter(into, blocks_of(parts), root, owner, seconds)
            give_back(memory, results)

        return self._begin(outputs, options, call)

    # --- every rank gets something else

    @takes_gpus(writes="outputs", reads="tensors")
    def reduce_scatter(
        self, outputs: Any, tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> GroupWork:
        """Give every rank the reduction of all tensors that are meant for it."""
        options = options_of(c10d.ReduceScatterOptions, opts, "reduceOp", timeout)
        outputs, lists = listed(outputs), [readable(parts) for parts in nested(tensors)]
        for output, parts in zip(outputs, lists, strict=True):
            self._require_one_each(parts)
            require_alike(output, parts)
            require_alike(output, [parts[self._rank]], output.numel())
        return self._reduce_scattered(outputs, lists, options)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> GroupWork:
        """Give every rank the reduction of its part of all tensors."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single

    @takes_gpus(writes="outputs", reads="tensors")
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> GroupWork:
        """Give every rank the reduction of its part of all tensors, for several tensors."""
        options = options_of(c10d.ReduceScatterOptions, opts, "reduceOp")
        lists = [readable([each]) for each in tensors]
        for output, (tensor,) in zip(outputs, lists, strict=True):
            require_alike(output, [tensor], output.numel() * self._size)
        return self._reduce_scattered(outputs, lists, options)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scattered(
        self, outputs: list[Tensor], lists: list[list[Tensor]], options: Any
    ) -> GroupWork:
        """Reduce lists of one tensor for each rank, or of one for all."""
        seconds = self._seconds(options)
        reductions = [reduction_of(options.reduceOp, each.dtype) for each in outputs]
        results = writable(outputs)

        def call() -> None:
            memory = in_memory(results)
            for each, parts, reduction in zip(memory, lists, reductions, strict=True):
                numbers = [reduction.numbers(part) for part in in_memory(parts)]
                into = reduction.numbers(each)
                self._collectives.reduce_scatter(into, numbers, reduction, seconds)
            give_back(memory, results)

        return self._begin(outputs, options, call)

    @takes_gpus(writes="outputs", reads="tensors")
    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> GroupWork:
        """Give every rank the tensors of all ranks that are meant for it."""
        options = options_of(c10d.AllToAllOptions, opts)
        seconds = self._seconds(options)
        results, given = writable(outputs), readable(tensors)
        for parts in (results, given):
            self._require_one_each(parts)
            require_alike(results[0], parts)
        mine = given[self._rank]
        require_alike(mine, [results[self._rank]], mine.numel())

        def call() -> None:
            memory, parts = in_memory(results), in_memory(given)
            blocks, owner = (blocks_of(memory), blocks_of(parts)), (memory, parts)
            self._collectives.all_to_all(*blocks, owner, seconds, alike=False)
            give_back(memory, results)

        return self._begin(outputs, options, call)

    @takes_gpus(writes="output", reads="tensor")
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: list[int] | None = None,
        input_sizes: list[int] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> GroupWork:
        """Give every rank the rows of all ranks' tensors that are meant for it."""
        options = options_of(c10d.AllToAllOptions, opts, None, timeout)
        seconds = self._seconds(options)
        (result,), (given,) = writable([output]), readable([tensor])
        alike = not (output_sizes or input_sizes)
        outgoing = self._rows(given, input_sizes)
        incoming = self._rows(result, output_sizes)
        require_alike(given, [result])
        sent, received = given.numel() // self._size, result.numel() // self._size
        if not alike:
            count = given.shape[1:].numel()  # of a row
            sent = outgoing[self._rank] * count
            received = incoming[self._rank] * result.shape[1:].numel()
        if sent != received:
            raise ValueError(f"{sent} elements for this rank itself, which expects {received}")

        def call() -> None:
            memory, mine = contiguous(result), contiguous(given)
            if alike:
                into, blocks = rows(memory, self._size), rows(mine, self._size)
            else:
                row = count * given.element_size()
                into, blocks = cut(memory, incoming, row), cut(mine, outgoing, row)
            self._collectives.all_to_all(into, blocks, (memory, mine), seconds, alike=alike)
            if memory is not result:
                result.copy_(memory)

        return self._begin([output], options, call)

    alltoall_base = all_to_all_single

    # --- messages

    @takes_gpus(reads="tensors", at_once=True)
    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> GroupWork:
        """Send a tensor to another rank."""
        tensor, to = message_of(tensors), self._require_member(peer)
        with torch_errors():
            message = self._messages.send(to, tag, bytes_of(tensor))
        return self._passes(tensor, message)

    @takes_gpus(writes="tensors", at_once=True)
    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> GroupWork:
        """Receive a tensor from another rank."""
        return self._receive(tensors, self._require_member(peer), tag)

    @takes_gpus(writes="tensors", at_once=True)
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> GroupWork:
        """Receive a tensor from any rank that sends one."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: list[Tensor], peer: int | None, tag: int) -> GroupWork:
        tensor = message_of(tensors)
        with torch_errors():
            message = self._messages.receive(peer, tag, bytes_of(tensor))
        return self._passes(tensor, message)

    def _passes(self, tensor: Tensor, message: Message) -> GroupWork:
        """Return the work of a message; a thread moves the messages for which nobody waits."""
        if self._server is None:
            self._server = threading.Thread(
                target=self._messages.serve, name="pgasdl-messages", daemon=True
            )
            self._server.start()
        completes = self._work_queue.complete
        work = MessageWork([tensor], self._messages, message, self._timeout, completes)
        return self._begun(work)

    # --- order, and the end

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> GroupWork:
        """Wait until every rank is here."""
        options = options_of(c10d.BarrierOptions, opts, None, timeout)
        seconds = self._seconds(options)
        return self._begin([], options, lambda: self._collectives.barrier(seconds))

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until every rank is here; rank 0 names those that are not in time."""
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        options = options_of(c10d.BarrierOptions, None)
        options.asyncOp = False

        def call() -> None:
            self._collectives.monitored_barrier(seconds, wait_all_ranks=wait_all_ranks)

        self._begin([], options, call).wait()

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> GroupWork:
        works, self._coalesced = self._coalesced, None
        return together(works or [])

    # --- shared by all calls

    def _begin(self, result: Result, options: Any, call: Callable[[], None]) -> GroupWork:
        for tensor in result:
            if tensor.is_inference():
                call = torch.inference_mode()(call)  # elsewhere they are read-only
                break
        later = options.asyncOp or self._coalesced is not None
        self._n_calls += 1
        return self._begun(self._work_queue.run(GroupWork(result), call, later=later))

    def _begun(self, work: GroupWork) -> GroupWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _seconds(self, options: Any) -> float:
        return seconds_of(options.timeout, self._timeout)

    def _require_member(self, rank: int) -> int:
        if not 0 <= rank < self._size:
            raise ValueError(f"rank {rank}: the group has ranks 0 to {self._size - 1}")
        return rank

    def _require_one_each(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self._size:
            raise ValueError(f"{len(tensors)} tensors: the group has {self._size} ranks")

    def _rows(self, tensor: Tensor, sizes: list[int] | None) -> list[int]:
        """Return how many rows of a tensor belong to each rank."""
        rows = tensor.size(0)
        if not sizes:
            if rows % self._size:
                raise ValueError(f"{rows} rows cannot be split equally between {self._size} ranks")
            return [rows // self._size] * self._size
        if len(sizes) != self._size or sum(sizes) != rows:
            raise ValueError(
                f"split sizes {sizes}: give one for each of {self._size} ranks, {rows} in all"
            )
        return sizes
