"""Operations of pgasdl, as contenders. Each checks its results: a wrong one gets no figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pgasdl import _native
from pgasdl.collectives.policy import Choice
from pgasdl.errors import MismatchError
from pgasdl.tools.bench.session import Session
from pgasdl.tools.bench.timing import batches, clock_cost, fill_cost, rounds_of, timed
from pgasdl.tools.bench.turns import Contender
from pgasdl.training.exchange import GradientExchange

Array = npt.NDArray[np.float32]
_PAGE = 4096


class Ours:
    """Makes contenders. Every member, and every contender that it returns, is collective."""

    def __init__(self, session: Session, plan: str | None = None) -> None:
        self._ranks = session.ranks
        self._context = session.context
        self._sync = session.sync if session.ranks.paced else None
        self._plan = plan
        self._clock_ns = clock_cost()

    # --- write_notify

    def notified_writes(self, nbytes: int) -> tuple[list[Contender], Callable[[], None]]:
        """Return contenders from the core and from Python; and a function that frees the memory."""
        context = self._context
        target = -(-nbytes // _PAGE) * _PAGE
        segment = context.segment(2 * target, notifications=1)
        rounds = rounds_of(nbytes)
        ping = self.ping(segment, nbytes, target)

        def core(calls: int) -> Sequence[float]:
            context.barrier()
            times = _native.notified_writes(context, segment, nbytes, target, calls, rounds)
            return [ns / 1e3 for ns in times]

        def python(calls: int) -> Sequence[float]:
            context.barrier()
            if context.rank > 1:
                return []
            return [ns / 1e3 for ns in batches(calls, rounds, ping)]

        ours = [Contender("core", core), Contender("python", python)]
        return ours, segment.delete

    def ping(self, segment: Any, nbytes: int, target: int) -> Callable[[int], None]:
        """Return round trips between ranks 0 and 1, from Python."""
        write_notify, waitsome = self._context.write_notify, self._context.notify_waitsome
        reset = self._context.notify_reset
        peer = 1 - self._context.rank
        here, there = segment[0:nbytes], segment[target : target + nbytes]

        def first(rounds: int) -> None:
            for _ in range(rounds):
                write_notify(here, peer, there, 0)
                waitsome(segment, 0, 1)
                reset(segment, 0)

        def second(rounds: int) -> None:
            for _ in range(rounds):
                waitsome(segment, 0, 1)
                reset(segment, 0)
                write_notify(here, peer, there, 0)

        return first if self._context.rank == 0 else second

    # --- allreduce

    def handle(self, count: int) -> tuple[Contender, str, Callable[[], None]]:
        """Return a handle on a segment; its plan; and a function that frees the memory."""
        segment = self._context.segment(4 * count, notifications=1)
        gradient: Array = segment.numpy(np.float32)
        handle = self._context.allreduce_handle(gradient, op="mean", plan=self._plan)
        measure = self._measure(gradient, [gradient], handle.run)

        def free() -> None:
            handle.close()
            segment.delete()

        return Contender("segment", measure), handle.plan, free

    def handles(
        self,
        count: int,
        choices: Sequence[Choice],
        kind: str = "average",
        *,
        in_segment: bool = True,
    ) -> tuple[list[Contender], Callable[[], None]]:
        """Return handles of several plans on one array, and a function that frees the memory."""
        segment = self._context.segment(4 * count, notifications=1) if in_segment else None
        gradient: Array = np.zeros(count, np.float32)
        if segment is not None:
            gradient = segment.numpy(np.float32)
        contenders, handles = [], []
        rooted = kind in ("reduce", "broadcast")
        results = self._results(kind, gradient)
        for choice in choices:
            options: dict[str, Any] = dict(choice.options)
            handle = self._context.collective_handle(kind, gradient, plan=choice.plan, **options)
            handles.append(handle)
            anew = rooted or self._ranks.paced
            measure = self._measure(gradient, results, handle.run, kind, anew=anew)
            contenders.append(Contender(str(choice), measure))

        def free() -> None:
            for handle in handles:
                handle.close()
            if segment is not None:
                segment.delete()

        return contenders, free

    def rooted(self, kind: str, count: int) -> tuple[Contender, Callable[[], None]]:
        """Return a reduce or a broadcast in a segment, and a function that frees the memory."""
        segment = self._context.segment(4 * count, notifications=1)
        memory: Array = segment.numpy(np.float32)
        handle = self._context.collective_handle(kind, memory, plan=self._plan)
        measure = self._measure(memory, self._results(kind, memory), handle.run, kind)

        def free() -> None:
            handle.close()
            segment.delete()

        return Contender(handle.plan, measure), free

    def _results(self, kind: str, memory: Array) -> list[Array]:
        """List what a collective leaves in an array on this rank, if it is defined."""
        return [memory] if kind != "reduce" or self._context.rank == 0 else []

    def uncounted(
        self, memory: Array, call: Callable[[], object]
    ) -> Callable[[int], Sequence[float]]:
        """Measure calls without a check of their results."""
        return self._measure(memory, [], call, anew=self._ranks.paced)

    def array(self, count: int) -> tuple[Contender, float]:
        """Return ``ctx.allreduce`` of an array outside segments; and nanoseconds to fill it."""
        gradient: Array = np.zeros(count, np.float32)
        context, plan = self._context, self._plan

        def call() -> None:
            context.allreduce(gradient, op="mean", plan=plan)

        measure = self._measure(gradient, [gradient], call)
        return Contender("array", measure), float(fill_cost(gradient.fill))

    # --- a whole model

    def model(
        self, layers: Sequence[int], bucket_bytes: int
    ) -> tuple[Contender, str, Callable[[], None]]:
        """Return one iteration, gradients in backward and waits in forward order; its plan."""
        exchange = GradientExchange(
            self._context,
            [((count,), np.float32) for count in layers],
            plan=self._plan,
            bucket_bytes=bucket_bytes,
        )
        ready, wait, finish = exchange.ready, exchange.wait, exchange.finish
        backward = range(len(layers))
        forward = range(len(layers) - 1, -1, -1)

        def iteration() -> None:
            for layer in backward:
                ready(layer)
            for layer in forward:
                wait(layer)
            finish()

        everything: Array = exchange.gradients.numpy(np.float32)
        seen = [exchange.gradient(layer) for layer in backward]
        name = f"buckets of {bucket_bytes}" if bucket_bytes else "layers"
        contender = Contender(name, self._measure(everything, seen, iteration))
        return contender, exchange.plan, exchange.close

    def _measure(
        self,
        memory: Array,
        results: Sequence[Array],
        call: Callable[[], object],
        kind: str = "average",
        *,
        anew: bool = True,
    ) -> Callable[[int], Sequence[float]]:
        """Measure calls; ``anew``: each on new data.

        Else each call works on the result of the one before, a mean of means. Between ranks that
        share processors, the time to fill an array cannot be told from the calls around it.
        """
        context, rank = self._context, self._context.rank
        fill_ns = 0.0 if self._ranks.paced or not anew else float(fill_cost(memory.fill))

        def fill(number: int) -> None:
            if anew or number == 0:
                memory.fill(number + rank)

        def measure(calls: int) -> Sequence[float]:
            context.barrier()
            moments = timed(calls, fill, self._sync, call)
            root = calls - 1 if anew else 0  # what rank 0 filled it with
            mean = root + (context.size - 1) / 2
            due = {"reduce": context.size * mean, "broadcast": root}.get(kind, mean)
            for result in results:
                if result[0] != due or result[-1] != due or result[len(result) // 2] != due:
                    raise MismatchError(
                        f"{kind}: {due} came out as {result[0]} ... {result[-1]}: no figures"
                    )
            return self._ranks.durations(moments, self._clock_ns, fill_ns)

        return measure
