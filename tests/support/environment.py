"""The environment in which a test starts a job."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

from support.places import INSTALLED

_LAUNCHERS = ("PGASDL_", "PMI", "OMPI_", "PMIX_", "PRTE_", "SLURM_", "TORCHELASTIC", "MPI_LOCAL")
# For ranks that share few cores: no thread pools in addition.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# A rank without a core for seconds is not lost; a test of such losses sets its own limit.
_PATIENT = {"PGASDL_STOPPED_AFTER": "60"}


@functools.cache
def _folder() -> str:
    """Return where ranks that fail write their flight records; it goes with this process."""
    folder = tempfile.mkdtemp(prefix="pgasdl-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """This process's environment, without any launcher's variables.

    Parameters
    ----------
    folders : where Python looks for modules, after this process's PYTHONPATH (a lane's PyTorch) and
        the folder of the package under test
    variables : to be set; they override all the rest
    """
    kept = {name: text for name, text in os.environ.items() if not name.startswith(_LAUNCHERS)}
    kept.pop("OMP_NUM_THREADS", None)  # torchrun sets it
    paths = [kept.get("PYTHONPATH", ""), str(INSTALLED), *map(str, folders)]
    ours = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TMPDIR": _folder()}
    return kept | _PATIENT | ours | variables
