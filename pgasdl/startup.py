"""``init``: from a launcher's variables to a context that has met all other ranks."""

from __future__ import annotations

import atexit
import logging
import signal
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from pgasdl import bootstrap, flight
from pgasdl.config import Config
from pgasdl.context import Context
from pgasdl.errors import ClosedError, UnavailableError
from pgasdl.launch.detect import detect
from pgasdl.routes import OFFERED

if TYPE_CHECKING:
    from mpi4py import MPI

log = logging.getLogger("pgasdl")

# The context of this process (ranks that are threads are not counted).
_current: weakref.ref[Context] | None = None


def init(
    *,
    rank: int | None = None,
    size: int | None = None,
    transport: str | None = None,
    timeout: float | None = None,
    comm: MPI.Intracomm | None = None,
    **settings: Any,
) -> Context:
    """Join the job and meet the other ranks. Collective.

    Parameters
    ----------
    rank, size : this process's place; None: from ``PGASDL_*``, torchrun, mpiexec, srun, or alone
    transport : "auto" (shm inside a machine, verbs between machines, or MPI where there is no
        verbs), "shm", "verbs" or "mpi"; None: ``PGASDL_TRANSPORT``, else "auto"
    timeout : seconds, of init and the default of every later call; None: ``PGASDL_TIMEOUT``, 60
    comm : an mpi4py communicator whose ranks are the job's, with whatever transport: they meet
        through it. None: with transport "mpi" ``MPI.COMM_WORLD``, else MPI is left alone
    settings : any other field of the table that ``pgasdl env`` prints, in lower case

    Returns
    -------
    Context : use it in a ``with`` statement

    Raises
    ------
    ConfigError       a variable or argument that cannot be right
    BootstrapError    the ranks could not meet; says what to set
    UnavailableError  the transport is not to be had; says why
    ClosedError       this process has a context already
    Timeout, PeerLost

    Notes
    -----
    ``PGASDL_*`` variables are read here, never at import. GASPI: gaspi_proc_init.
    """
    global _current  # noqa: PLW0603
    before = None if _current is None else _current()
    if before is not None and not before.closed:
        raise ClosedError("this process has an open context already: close it first, or pass it on")
    config = Config.from_environment(
        rank=rank, size=size, transport=transport, timeout=timeout, **settings
    )
    _start_log(config.log)
    if config.transport not in OFFERED:
        raise UnavailableError(
            f'transport "{config.transport}" is not in this build; there are '
            f'{", ".join(OFFERED)}, and "loopback" through pgasdl.loopback.run'
        )
    world = None
    if comm is not None or config.transport == "mpi":
        from pgasdl import mpi

        joined = mpi.join(comm, config)
        launch, store, world = joined.launch, joined.store, joined.world
    else:
        launch = detect(config)
        store = bootstrap.connect(config, launch)
    try:
        context = Context(config, launch, store, mpi=world)
    except BaseException:
        store.close(drain=0.0)
        raise
    _current = weakref.ref(context)
    _at_exit(context)
    _on_signal(context)
    return context


def _start_log(level: str) -> None:
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("pgasdl: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(level.upper())


def _at_exit(context: Context) -> None:
    reference = weakref.ref(context)

    def leave() -> None:
        open_context = reference()
        if open_context is not None:
            open_context.close(failed=hasattr(sys, "last_value"))

    atexit.register(leave)


def _on_signal(context: Context) -> None:
    """SIGUSR1 dumps the flight record, unless the program has its own use for it."""
    if threading.current_thread() is not threading.main_thread():
        return
    # `pgasdl run` starts its ranks with the signal ignored.
    if signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, signal.SIG_IGN):
        return
    reference = weakref.ref(context)

    def dump(number: int, frame: object) -> None:
        open_context = reference()
        if open_context is not None:
            flight.dump(open_context, "on SIGUSR1")

    signal.signal(signal.SIGUSR1, dump)
