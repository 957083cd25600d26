"""Detects the launcher of this process, and the process's place in the job, from variables.

The first match counts: explicit arguments and ``PGASDL_*``, torchrun, Open MPI, MPICH and other PMI
launchers, Slurm, else a single process. Open MPI comes before Slurm because an allocation sets
both. A partial or contradictory set raises ConfigError: a wrongly guessed rank would hang the job.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping

from pgasdl.config import Config
from pgasdl.errors import ConfigError
from pgasdl.topology import Launch


def detect(config: Config, environ: Mapping[str, str] | None = None) -> Launch:
    """Find this process's place, from ``config``, then from each launcher's variables in turn.

    ConfigError names variables of a set that is partial or contradictory.
    """
    environ = os.environ if environ is None else environ
    return (
        _explicit(config)
        or _torchrun(environ)
        or _openmpi(environ)
        or _mpich(environ)
        or _slurm(environ)
        or _single(environ)
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError(f"{name}={text[:80]!r} is not a number; unset it, or set PGASDL_RANK")
    return int(text)


def _complete(environ: Mapping[str, str], launcher: str, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        present = ", ".join(name for name in names if name not in missing)
        raise ConfigError(
            f"variables of {launcher}: {present} set, but not {', '.join(missing)}; set or unset "
            "all of them, or give PGASDL_RANK and PGASDL_SIZE"
        )


def _explicit(config: Config) -> Launch | None:
    given = {
        field: getattr(config, field) is not None
        for field in ("rank", "size", "local_rank", "local_size")
    }
    if not any(given.values()):
        return None
    if not (given["rank"] and given["size"]):
        raise ConfigError(
            "rank and size (PGASDL_RANK, PGASDL_SIZE) must be given together; "
            f"given: {', '.join(name for name, there in given.items() if there)}"
        )
    if given["local_rank"] != given["local_size"]:
        raise ConfigError(
            "local_rank and local_size (PGASDL_LOCAL_RANK, PGASDL_LOCAL_SIZE) must be given "
            "together"
        )
    assert config.rank is not None and config.size is not None
    if config.local_rank is not None and config.local_size is not None:
        local_rank, local_size = config.local_rank, config.local_size
    elif config.store is None or is_loopback(config.store[0]):
        local_rank, local_size = config.rank, config.size
    else:  # several machines meet there; containers and clusters' actors are one to a machine
        local_rank, local_size = 0, 1
    job_id = config.job_id or "pgasdl"
    return Launch("pgasdl", config.rank, config.size, local_rank, local_size, job_id)


def _torchrun(environ: Mapping[str, str]) -> Launch | None:
    # MASTER_ADDR and MASTER_PORT alone are often exported in a shell: they start no job.
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    _complete(environ, "torchrun", ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    master, port = environ["MASTER_ADDR"], _number(environ, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise ConfigError(f"MASTER_PORT={port} is not a port")
    local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if any(name in environ for name in local) or not (size == 1 or is_loopback(master)):
        _complete(environ, "torchrun", (*local, "RANK"))
        local_rank, local_size = (_number(environ, name) for name in local)
    else:
        local_rank, local_size = rank, size
    run = environ.get("TORCHELASTIC_RUN_ID", "none")
    # A restart of the same run is another job: its ranks must not meet those of an earlier attempt.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    job_id = f"torchrun:{run}:{attempt}:{port}"
    return Launch("torchrun", rank, size, local_rank, local_size, job_id, master)


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address, which other machines cannot reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _openmpi(environ: Mapping[str, str]) -> Launch | None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    variables = tuple(f"OMPI_COMM_WORLD_{name}" for name in names)
    if variables[0] not in environ and variables[1] not in environ:
        return None
    _complete(environ, "Open MPI", variables)
    rank, size, local_rank, local_size = (_number(environ, name) for name in variables)
    namespace = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    job_id = f"openmpi:{namespace or 'none'}"
    signature = () if namespace else variables[:2]
    return Launch("openmpi", rank, size, local_rank, local_size, job_id, signature=signature)


def _mpich(environ: Mapping[str, str]) -> Launch | None:
    if "PMI_RANK" not in environ and "PMI_SIZE" not in environ:
        return None
    _complete(environ, "MPICH", ("PMI_RANK", "PMI_SIZE"))
    rank, size = _number(environ, "PMI_RANK"), _number(environ, "PMI_SIZE")
    slurm = None
    for names in (
        ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
        ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ):
        if any(name in environ for name in names):
            _complete(environ, "MPICH", names)
            local_rank, local_size = (_number(environ, name) for name in names)
            break
    else:
        slurm = _slurm(environ)
        if slurm is not None:
            local_rank, local_size = slurm.local_rank, slurm.local_size
        elif size == 1:
            local_rank, local_size = 0, 1
        else:
            raise ConfigError(
                "PMI_RANK and PMI_SIZE are set, but not MPI_LOCALRANKID and MPI_LOCALNRANKS: set "
                "these, or start the ranks with `pgasdl run`, mpiexec.hydra or torchrun"
            )
    master = None if slurm is None else slurm.master
    job = environ.get("PMI_JOBID") or environ.get("PMI_KVSNAME")
    job_id = f"mpich:{job or 'none'}"
    signature = () if job else ("PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_PORT")
    return Launch("mpich", rank, size, local_rank, local_size, job_id, master, signature)


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    # Without a step id this process is the batch script, or a shell inside an allocation.
    if not step or "SLURM_PROCID" not in environ or "SLURM_NTASKS" not in environ:
        return None
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank, size = _number(environ, "SLURM_PROCID"), _number(environ, tasks)
    if size == 1:
        local_rank, local_size = 0, 1
    else:
        _complete(environ, "Slurm", ("SLURM_LOCALID", "SLURM_PROCID"))
        local_rank = _number(environ, "SLURM_LOCALID")
        local_size = _slurm_local_size(environ, size)
    job_id = f"slurm:{environ.get('SLURM_JOB_ID', 'none')}:{step}"
    master = _slurm_master(environ, rank)
    return Launch("slurm", rank, size, local_rank, local_size, job_id, master)


def _slurm_master(environ: Mapping[str, str], rank: int) -> str | None:
    # A distribution that the user made may place rank 0 on another node than the first.
    if rank == 0 and environ.get("SLURM_NODEID") != "0":
        return None
    # The first name of "gpu[07-09,12],login1" is gpu07.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", environ.get("SLURM_STEP_NODELIST", ""))
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else None


def _slurm_local_size(environ: Mapping[str, str], size: int) -> int:
    if environ.get("SLURM_STEP_NUM_NODES") == "1" or environ.get("SLURM_NNODES") == "1":
        return size
    name = "SLURM_STEP_TASKS_PER_NODE"
    _complete(environ, "Slurm", (name, "SLURM_NODEID"))
    node = _number(environ, "SLURM_NODEID")
    for part in environ[name].split(","):  # "4(x2),3": 4 tasks on two nodes, then 3 on one
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if match is None:
            break
        if node < int(match[2] or 1):
            return int(match[1])
        node -= int(match[2] or 1)
    raise ConfigError(f"{name}={environ[name][:80]!r} does not cover SLURM_NODEID")


def _single(environ: Mapping[str, str]) -> Launch:
    if "PMIX_RANK" in environ:
        raise ConfigError(
            "PMIX_RANK is set, but nothing tells the number of ranks: give PGASDL_RANK and "
            "PGASDL_SIZE, or start the ranks with `pgasdl run`, mpiexec or torchrun"
        )
    return Launch("single", 0, 1, 0, 1, f"single:{os.getpid()}")
