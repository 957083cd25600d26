"""A real Slurm of two nodes, which a test's script starts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.requiring import require_programs


def require() -> None:
    """Skip the test where Slurm is not installed."""
    require_programs(munged="munge", slurmctld="slurmctld", slurmd="slurmd", srun="slurm-client")


def start(nodes: Mapping[str, str], machines: Sequence[str]) -> str:
    """The line of a script that starts Slurm; slurm.sh says what the script has to be like.

    Parameters
    ----------
    nodes : addresses by name, the script's own node first
    machines : the nodes that have a /run of their own
    """
    given = [f"{name}={address}" for name, address in nodes.items()]
    return (
        f"slurm_nodes=({shlex.join(given)}) slurm_machines=({shlex.join(machines)})\n"
        f"source {shlex.quote(str(Path(__file__).with_suffix('.sh')))}"
    )
