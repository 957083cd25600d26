"""The ways to run programs: ranks as threads over loopback, or as processes.

``python ways.py WAY FROM TO TIMEOUT FEATURES STEPS`` is what run.py starts. It writes "seed N" when
rank 0 begins a program, so that the reader knows which program crashed, and "done" when all is
well.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import collectives
import leaving
import memory
import threads
import wrong
from generator import FEATURES, program_of
from program import Program
from rank import STEPS, Left, Rank

import pgasdl
from pgasdl import loopback
from pgasdl.plans import Plan, PlanSpec, register
from pgasdl.plans.algorithms import gdraa

sys.path.append(str(Path(__file__).parents[1]))
from support.tcp_proxy import through

# The launcher's options for ranks that are processes.
_MPICH, _OPENMPI = ("--mpi=mpich",), ("--mpi=openmpi",)
LAUNCHES = {
    "shm": ("--transport", "shm", "--keep-going", "--no-prefix"),
    "tcp": ("--transport", "tcp", "--keep-going", "--no-prefix"),
    "mpich": _MPICH,
    "openmpi": _OPENMPI,
    "mpich-created": _MPICH,  # windows that are not mapped, as between machines
    "openmpi-created": _OPENMPI,
}
SURVIVES = ("shm", "tcp", "verbs")  # a loss; over MPI it ends the job
_MPI_CANNOT = ("leave", "threads")  # not every MPI allows threads to call


def _twice(rank: int, size: int, count: int, *, phase: int = 0, **options: Any) -> Plan:
    return replace(gdraa.build(rank, size, count, **options), name="twice")


# A user-defined plan: its phases share their notifications.
register(PlanSpec("twice", _twice, "gdraa", ("average", "sum"), wire=False, phases=2))
assert all((collectives, leaving, memory, threads, wrong))  # they fill the table of steps
assert STEPS


def possible(way: str, features: Sequence[str]) -> tuple[list[str], bool]:
    """The features that ranks of this way can carry out, and whether they can map memory."""
    cannot: tuple[str, ...] = ()
    if way == "verbs":
        cannot = ("giveup",)  # an adapter refuses writes to a handle that its rank has closed
    elif way not in ("loopback", *SURVIVES):
        cannot = _MPI_CANNOT
    mapped = way not in ("verbs", "tcp") and not way.endswith("-created")
    return [feature for feature in features if feature not in cannot], mapped


def made(way: str, seed: int, features: Sequence[str]) -> Program:
    """The program of a seed, as far as ranks of this way can carry it out."""
    chosen, mapped = possible(way, features)
    return program_of(seed, chosen, mapped=mapped)


def worlds(programs: Sequence[Program]) -> Iterator[tuple[int, int]]:
    """Which programs one world runs: a world ends when a rank leaves it."""
    begin = 0
    for end, program in enumerate(programs, 1):
        if end == len(programs) or program.leaves or programs[end].world != program.world:
            yield begin, end
            begin = end


def run_all(ctx: pgasdl.Context, programs: Sequence[Program], threads: bool) -> None:
    """Run programs one after another on this rank."""
    rank = Rank(ctx, threads).prepare()
    for program in programs:
        if ctx.rank == 0:
            tell(f"seed {program.seed}")
        rank.run(program)
        rank.clear()
    if not programs[-1].leaves:
        ctx.barrier()  # no rank leaves while another may still need it


def tell(line: str) -> None:
    """Write a line to the process that started this one."""
    os.write(1, f"{line}\n".encode())


def over_loopback(programs: Sequence[Program], timeout: float) -> None:
    """Run programs of one world; raises what its ranks raise."""
    world = programs[0].world
    errors: list[BaseException] = []

    def main(ctx: pgasdl.Context) -> None:
        try:
            run_all(ctx, programs, True)
        except Left:
            raise
        except BaseException as error:
            errors.append(error)
            raise

    try:
        loopback.run(world.size, main, timeout=timeout, log="error", **world.adversary)
    except Left:
        pass
    except BaseException as error:
        if not errors:
            raise error
    if errors:
        # The rank that failed first tells why; the others only lost it.
        raise next((e for e in errors if not isinstance(e, pgasdl.PeerLostError)), errors[0])


def as_process(programs: Sequence[Program]) -> None:
    """Run programs of one world as one of its ranks."""
    proxy = os.environ.get("TCP_PROXY")
    network = through(int(proxy)) if proxy else contextlib.nullcontext()
    try:
        with network, pgasdl.init(log="error") as ctx:
            run_all(ctx, programs, False)
    except Left:
        pass


def main(arguments: Sequence[str]) -> int:
    """Run the seeds; 1 and the traceback on standard error if one fails."""
    way, first, last, timeout, features, steps = arguments
    faulthandler.enable()
    sys.setswitchinterval(5e-5)  # a rank that waits for the interpreter waits 5 ms otherwise
    chosen = features.split(",") if features else FEATURES
    programs = [made(way, seed, chosen) for seed in range(int(first), int(last))]
    if steps:
        kept = [int(step) for step in steps.split(",")]
        programs = [program.only(kept) for program in programs]
    try:
        if way == "loopback":
            for first_of, end in worlds(programs):
                over_loopback(programs[first_of:end], float(timeout))
        else:
            as_process(programs)
    except BaseException:
        traceback.print_exc()
        return 1
    tell("done")
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # threads of a failed program may still wait
