"""Other projects' launchers, which the tests start directly: mpiexec, prterun, torchrun."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

ALLOWED = {  # Open MPI may be started by root, and run more ranks than there are cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def tool(name: str) -> str:
    """Path of a launcher; the test is skipped where it is not installed."""
    path = shutil.which(name, path=os.path.dirname(sys.executable) + ":" + os.environ["PATH"])
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path
