"""Ranks as threads of one process, with an adversary: a transport for finding bugs.

>>> from pgasdl import loopback
>>> loopback.run(3, lambda ctx: ctx.rank)
[0, 1, 2]
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from pgasdl import _native
from pgasdl.config import Config
from pgasdl.context import Context
from pgasdl.errors import PeerLostError
from pgasdl.runtime.bootstrap import LocalStore
from pgasdl.runtime.init import start
from pgasdl.topology import Launch

__all__ = ["run"]

Result = TypeVar("Result")


def run(
    size: int,
    program: Callable[[Context], Result],
    *,
    seed: int | None = None,
    delay: int = 0,
    reorder: bool = False,
    late_source: bool = False,
    refuse: int = 0,
    fail_at: tuple[int, int] | None = None,
    mapped: bool = True,
    any_order: bool = False,
    completion_first: bool = False,
    **settings: Any,
) -> list[Result]:
    """Run ``program(ctx)`` on ``size`` ranks that are threads of this process.

    Parameters
    ----------
    size : int
        Number of ranks.
    program : Callable[[Context], Result]
        Every rank runs it.
    seed : int, optional
        Seed of the adversary.
    delay : int, default 0
        A pending transfer moves on with probability 1 / (delay + 1) at each look.
    reorder : bool, default False
        Deliver unordered writes in any order.
    late_source : bool, default False
        Read a source when its write is delivered, as a network card may.
    refuse : int, default 0
        A post finds room in its queue with probability 1 / (refuse + 1).
    fail_at : tuple[int, int], optional
        (rank, n): the n-th posted operation of that rank raises.
    mapped : bool, default True
        False: peers' memory cannot be loaded and stored directly.
    any_order : bool, default False
        Deliver notifications, too, before what was posted ahead of them.
    completion_first : bool, default False
        Hold each notification until what was posted ahead of it has completed.
    **settings : object
        As for :func:`pgasdl.init`.

    Returns
    -------
    list
        The result of each rank.

    Raises
    ------
    Exception
        The first error, by rank, that is not PeerLostError; a note names the rank. A failing rank
        closes its context as failed, so the others end too.
    """
    world = _native.LoopbackWorld(
        size,
        seed=seed or 0,
        delay=delay,
        reorder=reorder,
        late_source=late_source,
        refuse=refuse,
        fail_rank=-1 if fail_at is None else fail_at[0],
        fail_at=0 if fail_at is None else fail_at[1],
        mapped=mapped,
        any_order=any_order,
        completion_first=completion_first,
    )
    stores = LocalStore.world(size, Config.from_environment(**settings).timeout)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def rank_main(rank: int) -> None:
        try:
            config = Config.from_environment(rank=rank, size=size, **settings)
            launch = Launch("loopback", rank, size, rank, size, "loopback")
            with start(config, launch, stores[rank], threads=world, mapped=mapped) as context:
                results[rank] = program(context)
        except BaseException as error:
            error.add_note(f"on rank {rank} of {size} (loopback)")
            errors[rank] = error
            stores[rank].lose()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures = [error for error in errors if error is not None]
    if failures:
        # Prefer the cause to the PeerLostError of the others.
        raise next((e for e in failures if not isinstance(e, PeerLostError)), failures[0])
    return results
