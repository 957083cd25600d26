"""``join``: contexts of ranks that meet through a store of theirs, as often as they like."""

from __future__ import annotations

import dataclasses
import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

from pgasdl import _native
from pgasdl.config import Config
from pgasdl.context import Context
from pgasdl.errors import BootstrapError, ConfigError, PgasTimeoutError, UnavailableError
from pgasdl.runtime import bootstrap
from pgasdl.runtime.init import start_joined, start_log
from pgasdl.topology import Launch
from pgasdl.transports import is_by_mpi

_CALLS = ("set", "get", "wait", "add", "delete_key")


class KeyValueStore(Protocol):
    """What ``join`` needs of a store; every one of ``torch.distributed`` has it."""

    def set(self, key: str, value: str) -> object:
        """Store a value."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""

    def wait(self, keys: list[str], timeout: timedelta) -> object:
        """Wait until all keys are there; any RuntimeError or OSError: they did not come."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 before the first call, and return the sum."""

    def delete_key(self, key: str) -> object:
        """Remove a key."""


def join(
    store: KeyValueStore,
    uuid: str,
    *,
    rank: int,
    size: int,
    transport: str | None = None,
    timeout: float | None = None,
    **settings: Any,
) -> Context:
    """Make a context with the ranks that join under the same ``uuid``. Collective among them.

    For jobs that lose ranks and take others in: end the context of before, by
    ``close(failed=True)`` after a loss, and join again with a new ``uuid``, and whatever ranks
    there are now. A process may have several such contexts at once, and one by :func:`init`.

    Parameters
    ----------
    store : KeyValueStore
        Where the ranks meet: ``TCPStore``, ``FileStore`` or ``HashStore`` of
        ``torch.distributed``, or an object with the same ``set``, ``get``, ``wait``, ``add`` and
        ``delete_key``.
    uuid : str
        Names this context in ``store``, once: of a name that was used before, a short mark stays.
    rank, size : int
        This process's place among the ranks of this context, ``0 <= rank < size``.
    transport, timeout, **settings
        As of :func:`init`, but "mpi", whose ranks MPI has counted.

    Returns
    -------
    Context
        Use it in a ``with`` statement.

    Raises
    ------
    ConfigError
        A wrong variable or argument; the rank has joined under this ``uuid`` before; the ranks
        disagree on ``size``.
    BootstrapError
        The ranks cannot meet; says what to set. Ranks on several machines need
        ``PGASDL_SECRET_FILE``.
    UnavailableError
        The transport is not available; says why.
    PgasTimeoutError, PeerLostError
    """
    place = f"rank {rank} of {size}"
    config = Config.from_environment(
        rank=rank, size=size, transport=transport, timeout=timeout, **settings
    )
    if not uuid or not isinstance(uuid, str):
        raise ConfigError(f"{place}: uuid is {uuid!r}; it is a text that was not used before")
    if not 0 <= rank < size:
        raise ConfigError(f"{place}: the rank must be from 0 to {size - 1}")
    lacks = [name for name in _CALLS if not hasattr(store, name)]
    if lacks:
        raise ConfigError(f"{place}: a {type(store).__name__} is no store: no {', '.join(lacks)}")
    start_log(config.log)
    prefix = claim(store, uuid, config)
    return meet(store, prefix, config, socket.gethostname(), once=True)


def claim(store: KeyValueStore, uuid: str, config: Config) -> str:
    """Return the prefix with which this rank may :meth:`meet` others once."""
    place = f"rank {config.rank} of {config.size}"
    if is_by_mpi(config.transport):
        raise UnavailableError(f"{place}: transport mpi joins by pgasdl.init(comm=...) only")
    if store.add(f"pgasdl/{uuid}/joined/{config.rank}", 1) != 1:
        raise ConfigError(f"{place}: the uuid {uuid!r} was already used: take a new one each time")
    return f"pgasdl/{uuid}"


def meet(
    store: KeyValueStore, prefix: str, config: Config, own_host: str, *, once: bool = False
) -> Context:
    """Make a context among the ranks that use ``prefix`` in ``store``. Collective.

    ``config`` has the place; ``own_host``: by which name the others reach this machine, or "";
    ``once``: no others will use ``prefix`` after them.
    """
    # A secret and a store that our launcher prepared belong to the program's own context.
    config = dataclasses.replace(config, secret_fd=None, store=None, job_id=None)
    mine: dict[str, str] = {}
    started = False
    try:
        launch = _introduce(store, prefix, config, own_host, mine)
        context = start_joined(config, launch, bootstrap.connect(config, launch), None)
        started = True
        return context
    finally:
        # The next job in the same store must not take them for its own. Of a rank that failed they
        # tell the others why they do not fit.
        for key in mine if started or not once else ():
            with suppress(RuntimeError, OSError):  # the store may be gone
                store.delete_key(key)


def _introduce(
    store: KeyValueStore, prefix: str, config: Config, own_host: str, mine: dict[str, str]
) -> Launch:
    """Find this rank's place on its machine; agree on a name that no other job has.

    ``mine`` : gets what this rank has put into the store
    """
    rank, size = config.rank or 0, config.size or 1
    until = time.monotonic() + config.timeout
    mine[f"{prefix}/host/{rank}"] = f"{size} {_native.host_identity()}"
    if rank == 0:
        mine |= {f"{prefix}/job": secrets.token_hex(16), f"{prefix}/master": own_host}
    for key, value in mine.items():
        store.set(key, value)
    theirs = [f"{prefix}/host/{other}" for other in range(size)]
    theirs += [f"{prefix}/job", f"{prefix}/master"]
    try:
        store.wait(theirs, timedelta(seconds=max(0.001, until - time.monotonic())))
        *hosts, job, master = (store.get(key).decode() for key in theirs)
    except (RuntimeError, OSError) as error:
        raise PgasTimeoutError(
            f"rank {rank}: not all {size} ranks came to the store: {error}"
        ) from error
    sizes = [int(host.split()[0]) for host in hosts]
    if set(sizes) != {size}:
        raise ConfigError(f"rank {rank}: the ranks have sizes {sizes}: give all the same")
    near = [other for other in range(size) if hosts[other] == hosts[rank]]
    if len(near) < size and not master:
        raise BootstrapError("ranks on several machines: set MASTER_ADDR to rank 0's host")
    return Launch("store", rank, size, near.index(rank), len(near), f"store:{job}", master or None)
