"""How the ranks of a job meet: an authenticated key-value store, and the way into it.

``init`` needs only ``connect``. Its way depends on the launcher:

- one rank: :class:`LocalStore`, without a socket;
- `pgasdl run`: the launcher serves; an inherited descriptor holds the secret;
- torchrun, mpiexec or srun with every rank on this machine: rank 0 serves and hands the secret to
  ranks of the same user over AF_UNIX;
- several machines: rank 0 serves; PGASDL_SECRET_FILE holds the secret on each of them.

Where rank 0 serves, its loss does not end the job: another rank serves the survivors.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping

from pgasdl.config import Address, Config
from pgasdl.errors import BootstrapError
from pgasdl.kernel import looks_like_others
from pgasdl.runtime.bootstrap import rendezvous
from pgasdl.runtime.bootstrap.channel import SECRET_BYTES
from pgasdl.runtime.bootstrap.client import StoreClient
from pgasdl.runtime.bootstrap.detect import is_loopback
from pgasdl.runtime.bootstrap.hosted import HostedStore
from pgasdl.runtime.bootstrap.server import StoreServer
from pgasdl.runtime.bootstrap.store import REASON, LocalStore, RankState, Store
from pgasdl.topology import Launch

__all__ = [
    "REASON",
    "HostedStore",
    "LocalStore",
    "RankState",
    "Store",
    "StoreClient",
    "StoreServer",
    "connect",
]


def connect(
    config: Config,
    launch: Launch,
    timeout: float | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> Store:
    """Meet the other ranks of the job.

    PgasTimeoutError: they did not appear. BootstrapError: says what to set.
    ``timeout``: seconds, also the default of the store's calls; None: ``config.timeout``.
    """
    environ = os.environ if environ is None else environ
    timeout = config.timeout if timeout is None else timeout
    if launch.size == 1:
        return LocalStore(timeout=timeout)
    job_id = config.job_id or launch.job_id
    descriptor = rendezvous.descriptor_of_secret(config)
    if descriptor is not None:
        if config.store is None:
            raise BootstrapError("PGASDL_SECRET_FD is set, PGASDL_STORE is not: set both or none")
        secret = rendezvous.secret_from_descriptor(descriptor)
        return StoreClient(config.store, secret, launch.rank, launch.size, job_id, timeout)
    if config.secret_file is not None:
        secret = rendezvous.secret_from_file(config.secret_file)
        return _connect_with_secret(config, launch, job_id, secret, timeout)
    if launch.kind == "pgasdl":
        raise BootstrapError(
            f"rank {launch.rank} of {launch.size} was given by hand, but no secret: start the "
            "ranks with `pgasdl run`, or set PGASDL_SECRET_FILE (32 random bytes, mode 0600) and "
            "PGASDL_STORE=HOST:PORT, where rank 0 will serve, for every rank; a process that a "
            "rank started is no rank of its job: unset PGASDL_RANK and PGASDL_SIZE there"
        )
    if not launch.one_machine:
        store = "" if launch.master else " and PGASDL_STORE=HOST:PORT of rank 0's machine"
        raise BootstrapError(
            f"{launch.kind} started {launch.size} ranks on several machines "
            f"({launch.local_size} on this one), and they need a common secret: make it once with "
            "(umask 077; head -c 32 /dev/urandom > ~/.pgasdl-secret), copy the file to every "
            f"machine with mode 0600, and set PGASDL_SECRET_FILE=~/.pgasdl-secret{store} "
            "for every rank"
        )
    if looks_like_others():
        raise BootstrapError(
            f"uid {os.geteuid()} stands for all users whom this user namespace does not know: map "
            "this user's uid into it, or set PGASDL_SECRET_FILE, so that none of them gets the "
            "secret of the job"
        )
    name = rendezvous.beacon_name(launch, environ)
    if launch.rank == 0:
        secret = secrets.token_bytes(SECRET_BYTES)
        beacon = rendezvous.open_beacon(name, time.monotonic() + min(1.0, timeout))
        server = StoreServer(secret, launch.size, job_id=job_id, beacon=beacon)
        return HostedStore(server.address, secret, launch, job_id, timeout, server=server)
    started = time.monotonic()
    secret, port = rendezvous.follow_beacon(name, launch, timeout)
    remaining = max(0.001, timeout - (time.monotonic() - started))
    hosted = HostedStore(("127.0.0.1", port), secret, launch, job_id, remaining)
    hosted.timeout = timeout
    return hosted


def _connect_with_secret(
    config: Config, launch: Launch, job_id: str, secret: bytes, timeout: float
) -> Store:
    addresses = _addresses(config, launch, job_id, secret)
    if launch.rank != 0:
        return HostedStore(addresses, secret, launch, job_id, timeout)
    host = addresses[0][0]
    if config.store is None and launch.master is not None and not launch.one_machine:
        host = rendezvous.route_to(launch.master)
        if is_loopback(host):
            raise BootstrapError(
                f"{launch.master}, where {launch.kind} runs rank 0, is a loopback address there, "
                "which the other machines cannot reach: set PGASDL_STORE=HOST:PORT with an address "
                "of rank 0's machine, for every rank"
            )
    problems: list[str] = []
    for _, port in addresses:
        try:
            server = StoreServer(secret, launch.size, host, port, job_id=job_id)
        except BootstrapError as error:
            problems.append(str(error))
            continue
        return HostedStore(server.address, secret, launch, job_id, timeout, server=server)
    raise BootstrapError("; ".join(problems))


def _addresses(config: Config, launch: Launch, job_id: str, secret: bytes) -> list[Address]:
    if config.store is not None:
        return [config.store]
    if launch.one_machine:
        host = "127.0.0.1"
    elif launch.master is not None:
        host = launch.master
    else:
        raise BootstrapError(
            f"{launch.kind} does not tell where rank 0 runs: set PGASDL_STORE=HOST:PORT, an "
            "address of rank 0's machine and a free port there, for every rank"
        )
    return [(host, port) for port in rendezvous.derived_ports(secret, job_id)]
