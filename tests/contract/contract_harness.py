"""One suite times every transport: ``@contract`` turns a function of ``ctx`` into a pytest test.

>>> @contract(ranks=2)
... def test_barrier(ctx):
...     ctx.barrier()

The function runs on every rank of a fresh job, once per row of ``TRANSPORTS``. What differs
between transports is in the rows and nowhere else.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from contract_pool import Pool, judged

from pgasdl.errors import UnavailableError
from pgasdl.launch import mpiexec

Program = Callable[..., Any]

# Settings of every job: no wait outlasts the deadline of its test.
SETTINGS: dict[str, Any] = {"timeout": 15.0, "log": "warning"}
DEADLINE = 40.0


@dataclass(frozen=True)
class Transport:
    """A row: how a job of this transport is started, and with which settings."""

    name: str
    threads: bool = False
    mpi: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def run(
        self, pool: Pool, command: dict[str, Any], ranks: int, settings: dict[str, Any],
        deadline: float,
    ) -> list[Any]:  # fmt: skip
        start = pool.run_threads if self.threads else pool.run_processes
        if self.mpi is not None:
            _require_mpi(self.mpi)
            start = partial(pool.run_mpi, self.mpi)
        answers = start(command, ranks, SETTINGS | self.settings | settings, deadline)
        skipped = [answer["skip"] for answer in answers if "skip" in answer]
        if len(skipped) == len(answers):
            pytest.skip(f"{self.name}: {skipped[0]}")
        results = judged(answers)
        return results[0] if self.threads else results


@cache
def _missing_mpi(kind: str) -> str:
    try:
        mpiexec.find(kind)
    except UnavailableError as error:
        return str(error)
    return "" if importlib.util.find_spec("mpi4py") else f"no mpi4py ({mpiexec.INSTALL})"


def _require_mpi(kind: str) -> None:
    if missing := _missing_mpi(kind):
        pytest.skip(f"{kind}: {missing}")


def _adversary(seed: int) -> Transport:
    faults = {"seed": seed, "delay": 3, "reorder": True, "late_source": True}
    return Transport(f"adversary-{seed}", threads=True, settings=faults)


TRANSPORTS = (
    Transport("shm", settings={"transport": "shm"}),
    Transport("verbs", settings={"transport": "verbs"}),
    Transport("mpich", mpi="mpich", settings={"transport": "mpi"}),
    Transport("openmpi", mpi="openmpi", settings={"transport": "mpi"}),
    Transport("loopback", threads=True),
    Transport("unmapped", threads=True, settings={"mapped": False}),
    _adversary(1),
)
# For what an adversary can upset: order and completion.
ORDERING = (*TRANSPORTS, _adversary(2), _adversary(3))
PROCESSES = tuple(row for row in TRANSPORTS if not row.threads)
MAPPED = tuple(row for row in TRANSPORTS if row.name in ("shm", "loopback", "adversary-1"))


def run(
    pool: Pool, transport: Transport, test: Any, ranks: int, deadline: float = DEADLINE,
    **parameters: Any,
) -> list[Any]:  # fmt: skip
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

        test.__name__ = test.__qualname__ = program.__name__
        test.__module__, test.__doc__ = program.__module__, program.__doc__
        test.__wrapped__ = program  # type: ignore[attr-defined]  # where pytest says it stands
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
                for name in ("pool", "transport", "n_ranks", *names)
            ]
        )
        test.program, test.settings = program, settings  # type: ignore[attr-defined]
        test.bare, test.meet = bare, meet  # type: ignore[attr-defined]
        test.pytestmark = list(getattr(program, "pytestmark", []))  # type: ignore[attr-defined]
        test = pytest.mark.parametrize("n_ranks", sizes, ids=[f"{n}r" for n in sizes])(test)
        return pytest.mark.parametrize("transport", on, ids=[row.name for row in on])(test)

    return decorate
