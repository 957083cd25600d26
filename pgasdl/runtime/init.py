"""``init``: finds this rank's place, meets the other ranks, and makes the context."""

from __future__ import annotations

import atexit
import logging
import signal
import sys
import threading
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pgasdl import _native
from pgasdl.collectives.policy import load
from pgasdl.config import Config
from pgasdl.context import Context, current, set_current
from pgasdl.errors import ClosedError, PeerLostError, UnavailableError
from pgasdl.plans import plugins
from pgasdl.runtime import bootstrap
from pgasdl.runtime.bootstrap import Store
from pgasdl.runtime.bootstrap.detect import detect
from pgasdl.runtime.job import StartedJob
from pgasdl.runtime.routes import RankInfo, require_one_selection, topology_of
from pgasdl.topology import Launch
from pgasdl.transports import OF_THREADS, OFFERED, is_by_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

log = logging.getLogger("pgasdl")
# A rank that cannot begin waits for so many seconds, until the others have heard why.
_LAST_WORDS = 2.0
_open: weakref.WeakSet[Context] = weakref.WeakSet()  # and closed ones that the program keeps


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
    rank, size : int, optional
        This process's place; None: from ``PGASDL_*``, torchrun, mpiexec, srun, or alone.
    transport : str, optional
        "auto" (shm inside a machine, verbs between machines, or MPI where there is no verbs),
        "shm", "verbs" or "mpi"; None: ``PGASDL_TRANSPORT``, else "auto".
    timeout : float, optional
        Seconds for init, and default of every later call; None: ``PGASDL_TIMEOUT``, else 60.
    comm : MPI.Intracomm, optional
        An mpi4py communicator with the ranks of the job, which meet through it, on any transport.
        None: ``MPI.COMM_WORLD`` with transport "mpi", else MPI is not used.
    **settings : object
        Any other variable that ``pgasdl env`` lists, in lower case without ``PGASDL_``.

    Returns
    -------
    Context
        Use it in a ``with`` statement.

    Raises
    ------
    ConfigError
        A wrong variable or argument.
    BootstrapError
        The ranks cannot meet; says what to set.
    UnavailableError
        The transport is not available; says why.
    ClosedError
        This process has a context already: :func:`join` makes several.
    PgasTimeoutError, PeerLostError

    Notes
    -----
    ``PGASDL_*`` variables are read here, never at import. GASPI: gaspi_proc_init.
    """
    if current() is not None:
        raise ClosedError("this process has an open context already: close it first, or pass it on")
    config = Config.from_environment(
        rank=rank, size=size, transport=transport, timeout=timeout, **settings
    )
    start_log(config.log)
    if config.transport not in OFFERED:
        raise UnavailableError(
            f'transport "{config.transport}" is for ranks that are threads, through '
            f"pgasdl.loopback.run; there are {', '.join(OFFERED)}"
        )
    mpi = None
    if comm is not None or is_by_mpi(config.transport):
        from pgasdl.runtime.mpi.meet import join

        joined = join(comm, config)
        launch, store, mpi = joined.launch, joined.store, joined.world
    else:
        launch = detect(config)
        store = bootstrap.connect(config, launch)
    context = start_joined(config, launch, store, mpi)
    set_current(context)
    return context


def start_joined(
    config: Config, launch: Launch, store: Store, mpi: _native.MpiWorld | None
) -> Context:
    """Make the context of this process, whose ranks met in ``store``. Collective."""
    try:
        context = start(config, launch, store, mpi=mpi)
    except Exception:
        store.close(drain=_LAST_WORDS)
        raise
    except BaseException:
        store.close(drain=0.0)
        raise
    _open.add(context)
    # Before what was registered until now, such as the end of PyTorch's groups.
    atexit.unregister(_leave_all)
    atexit.register(_leave_all)
    _on_signal()
    return context


def start(
    config: Config,
    launch: Launch,
    store: Store,
    *,
    threads: _native.LoopbackWorld | None = None,
    mapped: bool = True,
    mpi: _native.MpiWorld | None = None,
) -> Context:
    """Exchange what the ranks know, derive the topology, and make the context. Collective.

    ``threads`` and ``mpi`` are the world of ranks that are threads, or that came through MPI;
    ``mapped`` False: threads do not map each other's memory.
    """
    plugins.load(config.plan_modules or "")
    policy = load(config.policy or "")
    asked = config.transport if threads is None else OF_THREADS
    plans = ", ".join(plugins.names())
    own = RankInfo.here(launch, config, asked, str(policy), plans, mpi)
    try:
        told = store.exchange("rank", own.encoded(), config.timeout)
    except PeerLostError as error:
        words = f"rank {error.rank} ended before its pgasdl.init was over"
        raise PeerLostError(words, error.rank) from None
    decoded = {words: RankInfo.decoded(words) for words in dict.fromkeys(told)}
    ranks = [decoded[words] for words in told]
    require_one_selection(launch.rank, ranks)
    near = frozenset() if mpi is None else frozenset(mpi.near)
    topology = topology_of(launch, ranks, mapped=mapped, near=near)
    context = Context(config, topology, policy, StartedJob(config, topology, store, threads, mpi))
    log.info("rank %d of %d: %s", launch.rank, launch.size, topology.routes)
    return context


def start_log(level: str) -> None:
    """Log to standard error, unless the program has set up logging."""
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("pgasdl: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(level.upper())


def _leave_all() -> None:
    with ExitStack() as stack:  # one that cannot be closed keeps no other open
        for context in list(_open):
            stack.callback(_leave, context)


def _leave(context: Context) -> None:
    error = getattr(sys, "last_value", None)
    if error is not None and not context.closed:
        context._job.report(context, error)
    context.close(failed=error is not None)


def _on_signal() -> None:
    """Make SIGUSR1 dump the flight record, unless the program handles that signal itself."""
    if threading.current_thread() is not threading.main_thread():
        return
    # `pgasdl run` starts its ranks with the signal ignored.
    if signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(signal.SIGUSR1, _dump)


def _dump(number: int, frame: object) -> None:
    for context in list(_open):
        if not context.closed:
            context.dump_flight_record("on SIGUSR1")
