"""Steps: several threads of a rank, in one collective or each in its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from memory import receive, send
from oracle import reduced, require, value
from rank import Rank, step

import pgasdl


def in_threads(*works: Callable[[], None]) -> None:
    """Run the functions concurrently; raise the first error."""
    with ThreadPoolExecutor(len(works)) as pool:
        for future in [pool.submit(work) for work in works]:
            future.result()


@step
def together(r: Rank, group: str, call: str, key: int, count: int, plan: str, rank: int) -> None:
    """On one rank two threads make the same call: one is refused, the other is not harmed.

    The other ranks join after they are told which thread was refused: until then the other thread
    is certainly inside.
    """
    of, ranks = r.objects[group], r.ranks_of[group]
    arrays = [value(rank, key + number, count, "float32") for number in range(2)]
    dtype = str(arrays[0].dtype)

    def collective(mine: np.ndarray) -> np.ndarray:
        if call == "segment":
            made = r.ctx.segment(4096, group=of)
            assert made.nbytes == 4096
            made.delete()
        elif call == "barrier":
            of.barrier()
        elif call == "reduce":
            return of.combine(mine, "sum")
        else:
            r.ctx.allreduce(mine, op="sum", plan=plan, group=of)
        return mine

    def terms(who: int) -> list[np.ndarray]:
        return [arrays[who] if each == rank else value(each, key, count, dtype) for each in ranks]

    def check(found: np.ndarray, who: int) -> None:
        if call in ("reduce", "allreduce"):
            require(found, reduced(terms(who), False), f"{call} of two threads")

    if r.rank != rank:
        winner = receive(r, rank, key)[0]
        check(collective(value(r.rank, key, count, dtype)), winner)
        return
    refusals: list[int] = []
    results: dict[int, np.ndarray] = {}

    def one(who: int) -> None:
        try:
            results[who] = collective(arrays[who].copy())
        except pgasdl.PgasError as error:
            if refusals or isinstance(error, (pgasdl.PgasTimeoutError, pgasdl.PeerLostError)):
                raise
            refusals.append(who)
            for peer in ranks:
                if peer != rank:
                    send(r, peer, key, bytes([1 - who]))

    in_threads(lambda: one(0), lambda: one(1))
    assert len(refusals) == 1, f"{len(refusals)} of two threads in one {call} were refused"
    check(results[1 - refusals[0]], 1 - refusals[0])


@step
def apart(r: Rank, groups: Sequence[str], key: int, turns: int, plan: str) -> None:
    """Two threads, each with its own group."""

    def work(number: int) -> None:
        of = r.objects[groups[number]]
        ranks = r.ranks_of[groups[number]]
        mine = np.zeros(100 + number, np.float32)
        for turn in range(turns):
            at = key + 2 * turn + number
            terms = [value(rank, at, mine.size, "float32") for rank in ranks]
            mine[...] = terms[r.rank]
            r.ctx.allreduce(mine, op="sum", plan=plan, group=of)
            wanted = reduced(terms, False)
            require(mine, wanted, f"allreduce of thread {number}, plan {plan}")
            require(of.combine(terms[r.rank], "sum"), wanted, f"reduce of thread {number}")
            of.barrier()

    in_threads(lambda: work(0), lambda: work(1))


@step
def look(r: Rank, name: str, who: Sequence[bool]) -> None:
    """From now on a thread checks for notifications, and thereby receives whatever arrives."""
    flags = r.ctx.segment(8, notifications=2)  # in which nobody raises one
    r.at_end.append(flags.close)
    if not who[r.rank]:
        return
    stop = threading.Event()

    def main() -> None:
        while not stop.is_set():
            try:
                assert r.ctx.notify_reset(flags, 0) == 0
            except pgasdl.ClosedError:
                return
            stop.wait(0.0002)

    thread = threading.Thread(target=main)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()

    r.at_end.append(end)
