"""``PGASDL_*``, and the variables by which launchers tell a rank its place."""

from __future__ import annotations

import os

from fuzz_drive import Input

from pgasdl.config import VARIABLES, Config, format_value, listing
from pgasdl.errors import ConfigError
from pgasdl.runtime.bootstrap.detect import detect

_NAMES = (
    *(variable.name for variable in VARIABLES),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    *("PMI_RANK", "PMI_SIZE", "PMI_JOBID", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMIX_RANK"),
    *(f"SLURM_{name}" for name in ("STEP_ID", "PROCID", "NTASKS", "LOCALID", "NODEID")),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_NODES", "SLURM_JOB_ID"),
)


def variables(data: bytes) -> dict[str, str]:
    """Records that end with a zero: a name (spelled, or one byte that counts from "0"), "=", value.

    As in a process's environment: no zeros inside, and bytes that are not UTF-8 are surrogates.
    """
    found = {}
    for record in Input(data).rest().split(b"\0"):
        name, _, value = record.partition(b"=")
        number = name[0] - 48 if len(name) == 1 else -1
        known = 0 <= number < len(_NAMES)
        found[_NAMES[number] if known else os.fsdecode(name)] = os.fsdecode(value)
    return found


def one(data: bytes) -> None:
    """Every value is refused with a ConfigError, or understood as written."""
    environ = variables(data)
    rows, problems = listing(environ)
    assert len(rows) == len(VARIABLES)
    try:
        config = Config.from_environment(environ)
    except ConfigError:
        assert problems
        return
    assert not problems
    for variable in VARIABLES:
        value = getattr(config, variable.field)
        if isinstance(value, int | str | tuple):
            assert variable.parse(format_value(value)) == value
    try:
        launch = detect(config, environ)
    except ConfigError:
        return
    assert 0 <= launch.rank < launch.size
    assert 0 <= launch.local_rank < launch.local_size <= launch.size
