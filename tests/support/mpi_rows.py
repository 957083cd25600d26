"""The MPIs under test, one row each: those that ``find`` chooses, and Debian's, by their paths."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pgasdl.errors import UnavailableError
from pgasdl.runtime.launch import mpiexec


@dataclass(frozen=True)
class Row:
    """One MPI.

    Attributes
    ----------
    kind : a key of ``mpiexec.LAUNCHERS``
    launcher : as ``pgasdl run --mpi`` takes it, a kind or a path
    mpi4py : variable that names a folder with an mpi4py that was built for this MPI
    """

    name: str
    kind: str
    launcher: str
    mpi4py: str = ""

    def found(self) -> mpiexec.Mpiexec:
        """Its launcher and library; UnavailableError if they are not installed."""
        return mpiexec.at(self.launcher) if self.is_debians else mpiexec.find(self.launcher)

    @property
    def is_debians(self) -> bool:
        return os.sep in self.launcher

    def environ(self, variables: dict[str, str]) -> dict[str, str]:
        """Its ranks' environment; the folder comes before all others, which may have mpi4py too."""
        if not self.mpi4py:
            return variables
        paths = os.environ[self.mpi4py], variables.get("PYTHONPATH", "")
        return variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


ROWS = {
    row.name: row
    for row in (
        Row("mpich", "mpich", "mpich"),
        Row("openmpi", "openmpi", "openmpi"),
        Row("debian_mpich", "mpich", "/usr/bin/mpiexec.mpich", "MPI4PY_OF_DEBIAN_MPICH"),
        Row("debian_openmpi", "openmpi", "/usr/bin/mpirun.openmpi"),
    )
}


@cache
def missing(name: str) -> str:
    """Why a row cannot run here; empty if it can."""
    row = ROWS[name]
    if importlib.util.find_spec("mpi4py") is None:
        return f"no mpi4py ({mpiexec.INSTALL})"
    try:
        library = row.found().library
    except UnavailableError as error:
        return str(error)
    if row.is_debians and not missing(row.kind) and same(library, ROWS[row.kind].found().library):
        return f"row {row.kind} runs it"
    if row.mpi4py and not os.path.isdir(os.path.join(os.environ.get(row.mpi4py, ""), "mpi4py")):
        return (
            f"{row.mpi4py} names no folder with an mpi4py that was built for {library}: "
            f"MPICC=mpicc.mpich pip install --no-binary mpi4py --target FOLDER mpi4py, from an "
            "environment without PyPI's mpich"
        )
    return ""


def same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def across(
    found: mpiexec.Mpiexec, hosts: Sequence[str], far: Path, interface: str, handed: Sequence[str]
) -> list[str]:
    """Its launcher and options for ranks on several hosts, each ``NAME:RANKS``.

    ``far`` : a program in place of ssh; ``interface`` : the network between them
    ``handed`` : names of variables that the ranks must get; hydra passes all on
    """
    both, size = ",".join(hosts), sum(int(host.rpartition(":")[2]) for host in hosts)
    if found.kind == "mpich":
        remote = ["-launcher", "ssh", "-launcher-exec", str(far), "-iface", interface]
        return [found.program, *remote, "-hosts", both, "-n", str(size)]
    prefix = str(Path(found.program).parents[1])
    remote = ["--prtemca", "plm_ssh_agent", str(far), "--prtemca", "oob_tcp_if_include", interface]
    names = [word for name in handed for word in ("-x", name)]
    first, *options = found.command(size, [])
    return [first, "--prefix", prefix, *remote, "--host", both, *names, *options]
