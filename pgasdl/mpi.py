"""This process's MPI through mpi4py: which library, who starts and ends it, what the core is told.

mpi4py finds and loads the library, initialises it, and owns communicators and the user's view of
them. Data never passes through Python: the core is given the handles and calls the library's own
functions (native/transport/mpi_library.hpp), so that neither turns nor the thread that watches over
the ranks need the GIL.

Known defects, and what is done about them (tests/mpi/test_mpi_defects.py tells when no longer):

- Open MPI 5.0.11 (PyPI): each window that is made where there is no RDMA device writes "OSC UCX
  component priority set inside component query failed" to standard error. ``OMPI_MCA_osc=^ucx`` is
  set where the kernel has no such device and nobody has set it.
- Open MPI 4.1.4 (Debian 12): MPI_Compare_and_swap of a rank on its own memory, in a window over
  memory that is there, ends in a segmentation fault. Such atomics are the processor's, which this
  library's own are at the target, too.
- MPICH 5.0.2 (PyPI) over UCX: what MPI_Iprobe has found, of any source and tag, an MPI_Irecv of any
  source and tag does not receive, ever. Messages are taken by MPI_Improbe and MPI_Imrecv.
- MPICH 5.0.2: its launcher kills all ranks as soon as one dies, so that survivors rarely come to
  name it (the launcher names its process). With ``-disable-auto-cleanup`` it sends SIGUSR1 to those
  that are left, of which they die; so that is not used.
- MPICH 5.0.2: the file of its shared memory, /dev/shm/mpich_shm_*, has a name until MPI_Finalize,
  and so stays after MPI_Abort. Who aborts here takes the name away; ranks that are killed cannot.
- MPICH 4.0.2 (Debian 12) calls its library libmpich.so.12, and mpi4py's wheels ask for
  libmpi.so.12: mpi4py has to be built for it, and ``pgasdl.launch.mpiexec.find`` says how. Built
  where PyPI's mpich lies beside Python it has that one's mpi.h, and misses MPI_Buffer_iflush.
- MPICH 4.0.2 (Debian 12): MPI_Win_unlock_all of a window over memory that is there may wait for
  ranks that have no part in the window, until they call MPI. Ranks that have a context do so at
  every heartbeat; others of the job have to themselves.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.util
import json
import os
import secrets
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pgasdl import _native
from pgasdl.bootstrap import HostedStore, LocalStore, Store, StoreClient, StoreServer, rendezvous
from pgasdl.bootstrap.channel import SECRET_BYTES
from pgasdl.config import Config
from pgasdl.errors import ConfigError, Timeout, UnavailableError
from pgasdl.launch.detect import Launch
from pgasdl.launch.mpiexec import INSTALL, KINDS, Mpiexec, library_beside

if TYPE_CHECKING:
    from mpi4py import MPI

    from pgasdl.context import Context

_FRAME = 1024  # bytes in which rank 0 tells where the store is
_END_SECONDS = 10.0
_WORDS_SECONDS = 0.5  # launchers drop at an abort what they have not forwarded yet, tracebacks too


@dataclass(frozen=True, slots=True)
class Joined:
    """What ``init`` needs of a job that meets through a communicator."""

    launch: Launch
    store: Store
    world: _native.MpiWorld


# --- the library


def launcher_of_this_process() -> Mpiexec | None:
    """The MPI launcher that started this process, with its library; None if there is none.

    Where several MPIs are installed, ranks that load another than their launcher's are all alone.
    """
    for program in _ancestors():
        for kind, row in KINDS.items():
            if os.path.basename(program) in row.servants:
                return Mpiexec(kind, program, library_beside(program, row) or "")
    return None


def _ancestors() -> Iterator[str]:
    pid = os.getppid()
    while pid > 1:
        with suppress(OSError):
            yield os.readlink(f"/proc/{pid}/exe")
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            return


def load() -> Any:
    """mpi4py's ``MPI``, initialised.

    Raises
    ------
    UnavailableError   no mpi4py, no library, or it is over already
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise UnavailableError(f'transport "mpi" is not to be had: no mpi4py ({INSTALL})')
    chosen = {"MPI4PY_LIBMPI", "MPI4PY_MPIABI"} & set(os.environ)
    found = launcher_of_this_process()
    if "mpi4py.MPI" not in sys.modules:
        if not chosen and found is not None and found.library:
            os.environ["MPI4PY_LIBMPI"] = found.library
        _work_around()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UnavailableError(
            f'transport "mpi" is not to be had: mpi4py loads no MPI: {error} ({INSTALL}; '
            "MPI4PY_LIBMPI names its library)"
        ) from error
    if MPI.Is_finalized():
        raise UnavailableError('transport "mpi" is not to be had: MPI was finalised already')
    if not MPI.Is_initialized():
        # mpi4py.rc.initialize is off, and nobody has: then it is ours to end, too.
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(MPI.Finalize)
    _end_with_python()
    return MPI


def _work_around() -> None:
    """Settings of Open MPI that avoid known defects, where the user has not chosen (see above)."""
    if not os.path.isdir("/sys/class/infiniband"):
        os.environ.setdefault("OMPI_MCA_osc", "^ucx")


def threads(mpi: Any) -> str:
    """The thread level that MPI granted."""
    level = mpi.Query_thread()
    if level == mpi.THREAD_MULTIPLE:
        return "multiple"
    if level == mpi.THREAD_SERIALIZED:
        return "serialized"
    return "funneled" if level == mpi.THREAD_FUNNELED else "single"


def version(mpi: Any) -> str:
    """The library's own name and version, in one line."""
    words = mpi.Get_library_version().replace("\0", "").split("\n")[0].split(",")[0]
    return " ".join(words.split())


# --- meeting


def join(communicator: MPI.Intracomm | None, config: Config) -> Joined:
    """Meet the ranks of a communicator. Collective over it.

    Parameters
    ----------
    communicator : None: ``MPI.COMM_WORLD``

    Raises
    ------
    UnavailableError   no MPI, one that cannot do it, or one that sees another number of ranks
    Timeout            a rank of the communicator did not come
    ConfigError        rank and size are given too, and are not the communicator's
    """
    mpi = load()
    comm = mpi.COMM_WORLD if communicator is None else communicator
    _require_whole_job(mpi, comm, config, explicit=communicator is not None)
    kept = _kept_with(mpi, comm)
    kept.arrive(comm, config.timeout)
    launch, store = _meet(mpi, kept, config)
    return Joined(launch, store, kept.world)


def _require_whole_job(mpi: Any, comm: MPI.Intracomm, config: Config, *, explicit: bool) -> None:
    if comm == mpi.COMM_NULL or comm.Is_inter():
        raise UnavailableError("comm must be an intra-communicator that this rank belongs to")
    given = config.rank, config.size
    if explicit:
        if given not in ((None, None), (comm.rank, comm.size)):
            raise ConfigError(
                f"rank {given[0]} and size {given[1]} are not those of the communicator, rank "
                f"{comm.rank} of {comm.size}: give comm alone"
            )
        return
    launcher = next((os.environ[n] for n in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
                     if os.environ.get(n)), None)  # fmt: skip
    wanted = config.size if config.size is not None else int(launcher or comm.size)
    found = launcher_of_this_process()
    if wanted != comm.size or (found is not None and comm.size == 1 and wanted != 1):
        by = f" {found.program} started it" if found is not None else ""
        library = f", whose library is {found.library}" if found is not None else ""
        raise UnavailableError(
            f'transport "mpi": this job has {wanted} ranks, but MPI ({version(mpi)}) sees '
            f"{comm.size}:{by}{library}; start the ranks with the mpiexec of the MPI that mpi4py "
            "loads, or set MPI4PY_LIBMPI to the library of the mpiexec in use"
        )


def _meet(mpi: Any, kept: _Kept, config: Config) -> tuple[Launch, Store]:
    """Rank 0 serves the store, and tells the others where through MPI."""
    comm, (rank, size, _, local_size) = kept.comm, kept.place
    if size == 1:
        launch = Launch("mpi", *kept.place, f"mpi:{os.getpid()}")
        return launch, LocalStore(timeout=config.timeout)
    frame = bytearray(_FRAME)
    server = None
    if rank == 0:
        secret, job_id = secrets.token_bytes(SECRET_BYTES), f"mpi:{secrets.token_hex(8)}"
        server = StoreServer(secret, size, *_address(config, local_size == size), job_id=job_id)
        words = {"job": job_id, "secret": secret.hex(), "address": server.address}
        text = json.dumps(words).encode()
        frame[: len(text)] = text
    try:
        comm.Bcast([frame, mpi.BYTE], 0)
        words = json.loads(bytes(frame).rstrip(b"\0"))
        secret = bytes.fromhex(words["secret"])
        launch = Launch("mpi", *kept.place, words["job"])
        if server is not None:
            return launch, HostedStore(server, secret, launch, launch.job_id, config.timeout)
    except BaseException:
        if server is not None:
            server.close()
        raise
    address = (words["address"][0], int(words["address"][1]))
    client = StoreClient(address, secret, rank, size, launch.job_id, config.timeout, host=0)
    return launch, client


def _address(config: Config, one_machine: bool) -> tuple[str, int]:
    if config.store is not None:
        return config.store
    if one_machine:
        return "127.0.0.1", 0
    # Of the interface that the default route takes: nothing is sent there.
    return rendezvous.route_to(("192.0.2.1", 9)), 0


# --- what the core keeps, from context to context


class _Kept:
    """What hangs on a user's communicator: our own copy of it, and the core's world.

    Attributes
    ----------
    comm : the copy
    place : rank, size, and the same among the ranks of this machine
    """

    comm: MPI.Intracomm
    place: tuple[int, int, int, int]
    world: _native.MpiWorld

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._arriving: MPI.Request | None = None
        self._complete = False

    def arrive(self, comm: MPI.Intracomm, seconds: float) -> None:
        """Wait until every rank is in init: collective calls that block come after this only.

        Raises
        ------
        Timeout   not all came; who asks again waits on
        """
        # Once begun it cannot be called off.
        arriving = self._arriving or (self.comm if self._complete else comm).Ibarrier()
        self._arriving = arriving
        deadline = time.monotonic() + seconds
        while not arriving.Test():
            if time.monotonic() > deadline:
                others = [rank for rank in range(comm.size) if rank != comm.rank]
                raise Timeout(
                    f"init on rank {comm.rank} of {comm.size}: not all of rank "
                    f"{', '.join(map(str, others[:16]))} came within {seconds:g} s (MPI does not "
                    "tell who is missing)"
                )
            time.sleep(0.0002)
        self._arriving = None
        if not self._complete:
            self._finish(comm)

    def _finish(self, comm: MPI.Intracomm) -> None:
        mpi = self._mpi
        self.comm = comm.Dup()
        self.comm.Set_errhandler(mpi.ERRORS_RETURN)
        local = self.comm.Split_type(mpi.COMM_TYPE_SHARED)
        self.place = (comm.rank, comm.size, local.rank, local.size)
        group, all_ranks = local.Get_group(), self.comm.Get_group()
        near = mpi.Group.Translate_ranks(group, None, all_ranks)
        local.Free()
        _require_unified(mpi, self.comm)
        handles = {
            "communicator": self.comm,
            "byte": mpi.BYTE,
            "uint64": mpi.UINT64_T,
            "sum": mpi.SUM,
            "info_null": mpi.INFO_NULL,
            "errors_return": mpi.ERRORS_RETURN,
        }
        numbers = {
            "no_check": mpi.MODE_NOCHECK,
            "any_source": mpi.ANY_SOURCE,
            "any_tag": mpi.ANY_TAG,
            "source_in_status": _source_in_status(mpi),
            "own_by_processor": int(version(mpi).startswith("Open MPI v4.")),
        }
        self.world = _native.MpiWorld.make(
            mpi.__file__,
            mpi._sizeof(mpi.Comm) == struct.calcsize("P"),
            {name: mpi._handleof(handle) for name, handle in handles.items()},
            numbers,
            threads(mpi),
            self.comm.rank,
            self.comm.size,
            {int(rank) for rank in near},
        )
        _worlds.append(self.world)
        self._complete = True


_keyval: int | None = None
_worlds: list[_native.MpiWorld] = []
_ended_by: list[str] = []


def _kept_with(mpi: Any, comm: MPI.Intracomm) -> _Kept:
    """Windows are freed when later ones are made: what is there is used again."""
    global _keyval  # noqa: PLW0603
    if _keyval is None:
        _keyval = mpi.Comm.Create_keyval()
    known = comm.Get_attr(_keyval)
    if isinstance(known, _Kept):
        return known
    kept = _Kept(mpi)
    comm.Set_attr(_keyval, kept)
    return kept


def _source_in_status(mpi: Any) -> int:
    """Where a status has its source; each library has another place for it."""
    status, rank = mpi.Status(), 0x5EED
    status.Set_source(rank)
    content = ctypes.string_at(mpi._addressof(status), mpi._sizeof(mpi.Status))
    return content.index(rank.to_bytes(4, sys.byteorder))


def _require_unified(mpi: Any, comm: MPI.Intracomm) -> None:
    """A flag is polled by loads, which only a window of one memory allows."""
    window = mpi.Win.Allocate(64, 1, mpi.INFO_NULL, comm)
    model = window.Get_attr(mpi.WIN_MODEL)
    window.Free()
    if model != mpi.WIN_UNIFIED:
        raise UnavailableError(
            f'transport "mpi" is not to be had: windows of {version(mpi)} have two memories '
            "(MPI_WIN_SEPARATE) here"
        )


# --- the end


def note_losses(context: Context) -> None:
    """Of a context that ends: after a loss MPI cannot be finalised, and the job is aborted."""
    lost = {
        rank: state
        for rank, state in enumerate(context._health())
        if state not in ("healthy", "closed") and rank != context.rank
    }
    if lost:
        words = ", ".join(f"rank {rank} {state}" for rank, state in lost.items())
        _ended_by.append(f"rank {context.rank} of {context.size}: {words}")


@functools.cache  # once
def _end_with_python() -> None:
    atexit.register(_end)


def _end() -> None:
    """Before mpi4py finalises MPI, which waits for every rank of the job."""
    from mpi4py import MPI

    if MPI.Is_finalized():
        return
    failed = hasattr(sys, "last_value")
    if _ended_by or (failed and MPI.COMM_WORLD.size > 1):
        why = _ended_by[0] if _ended_by else "this rank ends with an exception"
        print(f"pgasdl: {why}: MPI_Abort, for MPI_Finalize would wait", file=sys.stderr, flush=True)
        sys.stdout.flush()
        _unlink_shared_memory()
        time.sleep(_WORDS_SECONDS)
        MPI.COMM_WORLD.Abort(1)
    for world in _worlds:
        world.finish(_END_SECONDS)


def _unlink_shared_memory() -> None:
    """Of MPICH, which does so in MPI_Finalize alone (see above)."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        names = {line.rstrip().split(maxsplit=5)[-1] for line in maps}
    for name in names:
        if name.startswith("/dev/shm/mpich_shm_"):  # noqa: S108
            with suppress(OSError):
                os.unlink(name)
