"""One suite for every transport: ``@contract`` turns a function of ``ctx`` into a pytest test.

>>> @contract(ranks=2)
... def test_barrier(ctx):
...     ctx.barrier()

The function runs on every rank of a fresh job, once per row of ``TRANSPORTS``. Transports differ
in these rows and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from contract_pool import Pool, judged
from support import fake_driver, mpi_rows

from pgasdl.plans import PlanSpec

Program = Callable[..., Any]

# Settings of every job: no wait outlasts the deadline of its test.
SETTINGS: dict[str, Any] = {"timeout": 15.0, "log": "warning", "stopped_after": 60.0}
DEADLINE = 40.0


@dataclass(frozen=True)
class Transport:
    """A row: how a job of this transport is started, and with which settings.

    Attributes
    ----------
    mpi : key of ``mpi_rows.ROWS``, whose launcher starts the job
    gpu : segments lie on a GPU, of the fake driver
    modules : test modules that this row runs; empty: all
    """

    name: str
    threads: bool = False
    mpi: str | None = None
    gpu: bool = False
    modules: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def run(
        self,
        pool: Pool,
        command: dict[str, Any],
        ranks: int,
        settings: dict[str, Any],
        deadline: float,
    ) -> list[Any]:
        start = pool.run_threads if self.threads else pool.run_processes
        if self.mpi is not None:
            if missing := mpi_rows.missing(self.mpi):
                pytest.skip(f"{self.name}: {missing}")
            start = partial(pool.run_mpi, mpi_rows.ROWS[self.mpi])
        if self.gpu:
            command = command | {"gpu": fake_driver.variables(adapter="verbs" in self.name)}
        answers = start(command, ranks, SETTINGS | self.settings | settings, deadline)
        skipped = [answer["skip"] for answer in answers if "skip" in answer]
        if len(skipped) == len(answers):
            pytest.skip(f"{self.name}: {skipped[0]}")
        results = judged(answers)
        return results[0] if self.threads else results


def _adversary(seed: int, refuse: int = 0) -> Transport:
    faults = {"seed": seed, "delay": 3, "reorder": True, "late_source": True, "refuse": refuse}
    return Transport(f"adversary-{seed}", threads=True, settings=faults)


def _any_order(seed: int) -> Transport:
    faults = {"seed": seed, "delay": 3, "late_source": True, "mapped": False}
    order = {"any_order": True, "completion_first": True}
    return Transport("any-order", threads=True, settings=faults | order)


def _mpi(name: str, *modules: str, windows: str = "allocated") -> Transport:
    settings = {"transport": "mpi", "mpi_windows": windows}
    row = name if windows == "allocated" else f"{name}_{windows}"
    return Transport(row, mpi=name, modules=modules, settings=settings)


# Test modules for older MPIs and for windows over existing memory, which reach MPI's functions by
# every path.
CORE = tuple(
    f"test_contract_{part}"
    for part in ("transfers", "notifications", "counts", "atomics", "segments")
)
# For verbs over several rails: these, and what makes and gives up connections.
RAILS = (
    *CORE,
    *(
        f"test_contract_{part}"
        for part in ("queues", "reconnect", "threads", "plans", "groups", "passive")
    ),
)
# Those that take segments as they come: on a GPU, too.
ON_GPU = tuple(
    f"test_contract_{part}" for part in ("transfers", "notifications", "counts", "queues")
)
TRANSPORTS = (
    Transport("shm", settings={"transport": "shm"}),
    Transport("tcp", settings={"transport": "tcp"}),
    Transport("verbs", settings={"transport": "verbs"}),
    Transport("verbs-completion", settings={"transport": "verbs", "verbs_order": "completion"}),
    Transport(
        "verbs-rails",
        modules=RAILS,
        settings={"transport": "verbs", "verbs_rails": 2, "verbs_stripe": 4096},
    ),
    _mpi("mpich"),
    _mpi("openmpi"),
    _mpi("mpich", *CORE, "test_contract_allreduce", windows="created"),
    _mpi("openmpi", *CORE, "test_contract_allreduce", windows="created"),
    _mpi("debian_mpich", *CORE),
    _mpi("debian_mpich", *CORE, windows="created"),
    _mpi("debian_openmpi", *CORE),
    _mpi("debian_openmpi", *CORE, windows="created"),
    Transport("loopback", threads=True),
    Transport("gpu", gpu=True, modules=ON_GPU, settings={"transport": "shm"}),
    Transport("verbs-gpu", gpu=True, modules=ON_GPU, settings={"transport": "verbs"}),
    Transport("gpu-threads", gpu=True, threads=True, modules=ON_GPU),
    Transport("unmapped", threads=True, settings={"mapped": False}),
    _adversary(1),
)
# For what an adversary can upset: order, completion, and posts that find no room at first.
ORDERING = (*TRANSPORTS, _adversary(2), _adversary(3, refuse=2), _any_order(4))
PROCESSES = tuple(row for row in TRANSPORTS if not row.threads)
MAPPED = tuple(row for row in TRANSPORTS if row.name in ("shm", "loopback", "adversary-1"))


def can_run(ctx: Any, spec: PlanSpec) -> bool:
    """Whether ranks reach each other's memory as a plan needs it."""
    return not spec.mapped or ctx.mapped


# The rows that ``pytest`` runs without --full, and those that ``pytest -m gate`` does, with two
# ranks each where a test allows it. From GATE_CORE's the gate runs those in CORE.
QUICK = ("shm", "loopback")
GATE = ("adversary-1", "unmapped", "gpu")
GATE_CORE = ("mpich", "mpich_created", "tcp")


def tier(row: Transport, module: str) -> Any:
    """The mark of a row in a test module."""
    if row.name in QUICK:
        return ()
    in_gate = row.name in GATE or (row.name in GATE_CORE and module in CORE)
    return pytest.mark.gate if in_gate else pytest.mark.full


def rows(on: Sequence[Transport], module: str = "") -> list[Any]:
    """The rows as values for ``parametrize`` in a test module."""
    return [pytest.param(row, id=row.name, marks=tier(row, module)) for row in on]


def run(
    pool: Pool,
    transport: Transport,
    test: Any,
    ranks: int,
    deadline: float = DEADLINE,
    **parameters: Any,
) -> list[Any]:
    """Run a test's program on one transport and return what each rank returned."""
    program: Program = test.program
    command = {
        "folder": str(Path(inspect.getfile(program)).parent),
        "module": program.__module__,
        "function": program.__name__,
        "parameters": parameters,
        "bare": test.bare,
        "meet": test.meet,
    }
    return transport.run(pool, command, ranks, test.settings, deadline)


def contract(
    ranks: int | Sequence[int] = 2,
    *,
    on: Sequence[Transport] = TRANSPORTS,
    bare: bool = False,
    meet: bool = True,
    deadline: float = DEADLINE,
    **settings: Any,
) -> Callable[[Program], Callable[..., None]]:
    """Make a test of ``program(ctx, **parameters)``; parameters come from pytest, as JSON.

    Parameters
    ----------
    ranks : size of the job, or several sizes
    on : rows to run on
    bare : the program gets ``join``, a function that calls ``init``, instead of a context; only
        for rows of processes
    meet : end with a barrier, so that no rank leaves while others still need it
    deadline : seconds, after which the workers are killed
    settings : of ``init``
    """
    sizes = (ranks,) if isinstance(ranks, int) else tuple(ranks)

    def decorate(program: Program) -> Callable[..., None]:
        names = list(inspect.signature(program).parameters)[1:]

        def test(pool: Pool, transport: Transport, n_ranks: int, **parameters: Any) -> None:
            run(pool, transport, test, n_ranks, deadline, **parameters)

        able = [row for row in on if not row.modules or program.__module__ in row.modules]
        test.__name__ = test.__qualname__ = program.__name__
        test.__module__, test.__doc__ = program.__module__, program.__doc__
        test.__wrapped__ = program  # type: ignore[attr-defined]  # where pytest says the test is
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
                for name in ("pool", "transport", "n_ranks", *names)
            ]
        )
        test.program, test.settings = program, settings  # type: ignore[attr-defined]
        test.bare, test.meet = bare, meet  # type: ignore[attr-defined]
        test.pytestmark = list(getattr(program, "pytestmark", []))  # type: ignore[attr-defined]
        usual = next((n for n in sizes if n > 1), sizes[0])
        each_size = [
            pytest.param(n, id=f"{n}r", marks=() if n == usual else pytest.mark.full) for n in sizes
        ]
        test = pytest.mark.parametrize("n_ranks", each_size)(test)
        return pytest.mark.parametrize("transport", rows(able, program.__module__))(test)

    return decorate
