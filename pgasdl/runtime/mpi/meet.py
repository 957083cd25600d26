"""How the ranks of a communicator meet: rank 0 serves a store, and sends its address by MPI.

MPI also sends the job's secret, in the clear, between machines over the network. The secret does
not travel where all ranks have it by PGASDL_SECRET_FILE.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pgasdl import _native
from pgasdl.config import Config
from pgasdl.errors import BootstrapError, ConfigError, UnavailableError
from pgasdl.runtime.bootstrap import (
    HostedStore,
    LocalStore,
    Store,
    StoreServer,
    rendezvous,
)
from pgasdl.runtime.bootstrap.channel import SECRET_BYTES
from pgasdl.runtime.mpi.communicator import CommunicatorState, state_of
from pgasdl.runtime.mpi.library import launcher_of_this_process, load, version
from pgasdl.topology import Launch

if TYPE_CHECKING:
    from mpi4py import MPI

_FRAME = 1024  # bytes of rank 0's message with the store's address


@dataclass(frozen=True, slots=True)
class Joined:
    """A job that has met through a communicator, for ``init``."""

    launch: Launch
    store: Store
    world: _native.MpiWorld


def join(communicator: MPI.Intracomm | None, config: Config) -> Joined:
    """Meet the ranks of a communicator, None: ``MPI.COMM_WORLD``. Collective over it.

    UnavailableError: there is no MPI, or it lacks a feature or sees another number of ranks.
    PgasTimeoutError: a rank of the communicator did not come. ConfigError: rank and size are given,
    too, and differ from the communicator's. BootstrapError: PGASDL_SECRET_FILE is no secret, or not
    the same on all ranks.
    """
    mpi = load()
    comm = mpi.COMM_WORLD if communicator is None else communicator
    _require_whole_job(mpi, comm, config, explicit=communicator is not None)
    # A wrong file raises here, before others wait for this rank in MPI, which has no deadline.
    path = config.secret_file if comm.size > 1 else None
    secret = None if path is None else rendezvous.secret_from_file(path)
    state = state_of(mpi, comm)
    state.arrive(comm, config.timeout)
    launch, store = _meet(mpi, state, config, secret)
    return Joined(launch, store, state.world)


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
    launcher = next(
        (os.environ[n] for n in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE") if os.environ.get(n)), None
    )
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


def _meet(
    mpi: Any, state: CommunicatorState, config: Config, given: bytes | None
) -> tuple[Launch, Store]:
    """Serve the store on rank 0, which sends its address, and a secret unless one is given."""
    comm, (rank, size, _, local_size) = state.comm, state.place
    if size == 1:
        launch = Launch("mpi", *state.place, f"mpi:{os.getpid()}")
        return launch, LocalStore(timeout=config.timeout)
    frame = bytearray(_FRAME)
    server = None
    if rank == 0:
        job_id = f"mpi:{secrets.token_hex(8)}"
        secret = given or secrets.token_bytes(SECRET_BYTES)
        server = StoreServer(secret, size, *_address(config, local_size == size), job_id=job_id)
        told = None if given else secret.hex()
        words = {"job": job_id, "secret": told, "address": server.address}
        text = json.dumps(words).encode()
        frame[: len(text)] = text
    try:
        comm.Bcast([frame, mpi.BYTE], 0)
        words = json.loads(bytes(frame).rstrip(b"\0"))
        told = words["secret"]
        if bool(told) == bool(given):
            one, other = (0, rank) if told is None else (rank, 0)
            raise BootstrapError(
                f"rank {one} has PGASDL_SECRET_FILE, rank {other} has not: give all ranks the same"
            )
        secret = given or bytes.fromhex(told)
        launch = Launch("mpi", *state.place, words["job"])
        address = (words["address"][0], int(words["address"][1]))
    except BaseException:
        if server is not None:
            server.close()
        raise
    store = HostedStore(address, secret, launch, launch.job_id, config.timeout, server=server)
    return launch, store


def _address(config: Config, one_machine: bool) -> tuple[str, int]:
    if config.store is not None:
        return config.store
    if one_machine:
        return "127.0.0.1", 0
    # The address of the interface that the default route takes; nothing is sent.
    return rendezvous.route_to("192.0.2.1"), 0
