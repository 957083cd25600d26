"""Which launcher, which rank: tables of environments, real ones where a launcher was available."""

from __future__ import annotations

import pytest

from pgasdl.config import Config
from pgasdl.errors import ConfigError
from pgasdl.runtime.bootstrap.detect import detect
from pgasdl.topology import Launch

PGASDL = {"PGASDL_RANK": "1", "PGASDL_SIZE": "4"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-vm-3121@1",
    "PMIX_RANK": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
}


def place(environ: dict[str, str], **arguments: object) -> Launch:
    return detect(Config.from_environment(environ, **arguments), environ)


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("single", 0, 1, 0, 1)),
        (PGASDL, ("pgasdl", 1, 4, 1, 4)),
        (
            PGASDL | {"PGASDL_LOCAL_RANK": "0", "PGASDL_LOCAL_SIZE": "2"},
            ("pgasdl", 1, 4, 0, 2),
        ),
        # Ranks that meet at an address of a machine are on several.
        (PGASDL | {"PGASDL_STORE": "node1:29511"}, ("pgasdl", 1, 4, 0, 1)),
        (PGASDL | {"PGASDL_STORE": "127.0.0.1:29511"}, ("pgasdl", 1, 4, 1, 4)),
        (TORCHRUN, ("torchrun", 3, 4, 1, 2)),
        (
            # Variables set by hand, as PyTorch's env:// start-up reads them.
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            ("torchrun", 1, 2, 1, 2),
        ),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_RANK": "0"}, ("single", 0, 1, 0, 1)),
        (OPENMPI, ("openmpi", 2, 8, 0, 4)),
        (MPICH, ("mpich", 1, 2, 1, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ("mpich", 0, 1, 0, 1)),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
            ("mpich", 1, 4, 1, 2),
        ),
        (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "7"}, ("mpich", 5, 7, 1, 3)),
        (SLURM, ("slurm", 5, 7, 1, 3)),
        (
            SLURM
            | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"},
            ("slurm", 5, 7, 0, 1),
        ),
        (SLURM | {"SLURM_NNODES": "1", "SLURM_LOCALID": "5"}, ("slurm", 5, 7, 5, 7)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "6"}, ("slurm", 5, 6, 1, 3)),
        (without(SLURM, "SLURM_STEP_ID"), ("single", 0, 1, 0, 1)),
        (without(SLURM, "SLURM_STEP_ID") | {"SLURM_STEPID": "3"}, ("slurm", 5, 7, 1, 3)),
        (without(SLURM, "SLURM_PROCID"), ("single", 0, 1, 0, 1)),
        # Precedence: each launcher beats all that follow.
        (PGASDL | TORCHRUN | OPENMPI | MPICH | SLURM, ("pgasdl", 1, 4, 1, 4)),
        (TORCHRUN | OPENMPI | MPICH | SLURM, ("torchrun", 3, 4, 1, 2)),
        (OPENMPI | MPICH | SLURM, ("openmpi", 2, 8, 0, 4)),
        (MPICH | SLURM, ("mpich", 1, 2, 1, 2)),
    ],
)
def test_places(environ: dict[str, str], expected: tuple[object, ...]) -> None:
    found = place(environ)
    assert (found.kind, found.rank, found.size, found.local_rank, found.local_size) == expected


def test_arguments_come_first() -> None:
    found = place(PGASDL | TORCHRUN, rank=0, size=1)
    assert (found.kind, found.rank, found.size, found.local_size) == ("pgasdl", 0, 1, 1)
    assert found.one_machine


def test_job_ids_tell_jobs_apart() -> None:
    assert place(TORCHRUN).job_id != place(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "3"}).job_id
    assert place(TORCHRUN).job_id != place(TORCHRUN | {"MASTER_PORT": "29501"}).job_id
    assert place(OPENMPI).job_id == place(OPENMPI | {"OMPI_COMM_WORLD_RANK": "3"}).job_id
    assert place(SLURM).job_id != place(SLURM | {"SLURM_STEP_ID": "1"}).job_id
    assert place(PGASDL | {"PGASDL_JOB_ID": "mine"}).job_id == "mine"
    assert place(TORCHRUN).master == "10.0.0.1"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("login,node2", "login"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[3,5]", "gpu3"),
        ("rack[2-3]n[01-16]-ib,a", "rack2n01-ib"),
    ],
)
def test_rank_0_of_slurm_runs_on_the_first_node(nodes: str, first: str) -> None:
    several = SLURM | {"SLURM_STEP_NODELIST": nodes}
    assert place(several).master == first
    assert place(several | {"PMI_RANK": "5", "PMI_SIZE": "7"}).master == first
    rank_0 = several | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert place(rank_0 | {"SLURM_NODEID": "0"}).master == first
    assert place(rank_0).master is None  # it knows better
    assert place(SLURM).master is None


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"PGASDL_RANK": "0"}, "size"),
        ({"PGASDL_SIZE": "2"}, "rank"),
        ({"PGASDL_LOCAL_RANK": "0"}, "PGASDL_RANK"),
        (PGASDL | {"PGASDL_LOCAL_RANK": "0"}, "PGASDL_LOCAL_SIZE"),
        ({"PGASDL_RANK": "4", "PGASDL_SIZE": "4"}, "rank 4 of 4"),
        (PGASDL | {"PGASDL_LOCAL_RANK": "2", "PGASDL_LOCAL_SIZE": "2"}, "local rank 2 of 2"),
        (PGASDL | {"PGASDL_LOCAL_RANK": "2", "PGASDL_LOCAL_SIZE": "3"}, "contradicts"),
        (PGASDL | {"PGASDL_LOCAL_RANK": "1", "PGASDL_LOCAL_SIZE": "5"}, "contradicts"),
        *[
            (without(TORCHRUN, name), name)
            for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        ],
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK"),
        (without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE"),
        (TORCHRUN | {"RANK": "x"}, "RANK='x'"),
        (TORCHRUN | {"RANK": "-1"}, "RANK='-1'"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 of 4"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT"),
        *[(without(OPENMPI, name), name) for name in list(OPENMPI)[:4]],
        (OPENMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "4"}, "local rank 4 of 4"),
        (without(MPICH, "PMI_SIZE"), "PMI_SIZE"),
        (without(MPICH, "MPI_LOCALNRANKS"), "MPI_LOCALNRANKS"),
        (without(MPICH, "MPI_LOCALNRANKS", "MPI_LOCALRANKID"), "MPI_LOCALRANKID"),
        (SLURM | {"SLURM_PROCID": "7"}, "rank 7 of 7"),
        (without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4"}, "SLURM_STEP_TASKS_PER_NODE"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "four"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK"),
    ],
)
def test_partial_and_contradicting_sets_are_refused(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        place(environ)
    assert named in str(caught.value)
