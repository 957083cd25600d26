"""The MPI library that this process loads through mpi4py, and its abilities."""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pgasdl.errors import UnavailableError
from pgasdl.runtime.launch.mpiexec import INSTALL, LAUNCHERS, Mpiexec, library_beside
from pgasdl.runtime.mpi.shutdown import abort_or_finish_with_python


def launcher_of_this_process() -> Mpiexec | None:
    """Return the MPI launcher that started this process, with its library; None: no launcher.

    Where several MPIs are installed, a rank that loads another one than its launcher's is alone.
    """
    for program in _ancestors():
        for kind, row in LAUNCHERS.items():
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
    """Return mpi4py's ``MPI``, initialised.

    UnavailableError: there is no mpi4py or no library, or MPI was already finalised.
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise UnavailableError(f'transport "mpi" is not available: no mpi4py ({INSTALL})')
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
            f'transport "mpi" is not available: mpi4py loads no MPI: {error} ({INSTALL}; '
            "MPI4PY_LIBMPI names its library)"
        ) from error
    if MPI.Is_finalized():
        raise UnavailableError('transport "mpi" is not available: MPI was finalised already')
    if not MPI.Is_initialized():
        # mpi4py.rc.initialize is off and MPI is not initialised: then we also end it.
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(MPI.Finalize)
    abort_or_finish_with_python()
    return MPI


def _work_around() -> None:
    """Work around known defects of Open MPI (see the package) where the user has set nothing."""
    if not os.path.isdir("/sys/class/infiniband"):
        os.environ.setdefault("OMPI_MCA_osc", "^ucx")


def threads(mpi: Any) -> str:
    """Return the thread level that MPI granted."""
    level = mpi.Query_thread()
    if level == mpi.THREAD_MULTIPLE:
        return "multiple"
    if level == mpi.THREAD_SERIALIZED:
        return "serialized"
    return "funneled" if level == mpi.THREAD_FUNNELED else "single"


def sends_through_memory(mpi: Any) -> bool:
    """Whether the library sends messages through shared memory inside a machine.

    Open MPI does, unless OMPI_MCA_btl names ways without this one. For MPICH,
    ``COMM_TYPE_SHARED`` says it.
    """
    if not version(mpi).startswith("Open MPI"):
        return True
    ways = os.environ.get("OMPI_MCA_btl", "")  # noqa: SIM112
    return not ways or ways.startswith("^") or bool({"sm", "vader"}.intersection(ways.split(",")))


def version(mpi: Any) -> str:
    """Return the library's own name and version, in one line."""
    words = mpi.Get_library_version().replace("\0", "").split("\n")[0].split(",")[0]
    return " ".join(words.split())


def source_in_status(mpi: Any) -> int:
    """Find where a status has its source; each library has its own place for it."""
    status, rank = mpi.Status(), 0x5EED
    status.Set_source(rank)
    content = ctypes.string_at(mpi._addressof(status), mpi._sizeof(mpi.Status))
    return content.index(rank.to_bytes(4, sys.byteorder))
