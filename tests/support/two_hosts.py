"""Two hosts, node1 and node2, on this machine: each has its name and its address.

They are namespaces of one kernel. Names of hosts differ; launchers see two hosts, and the ranks
meet by addresses and a secret in a file, as between machines. Unless the hosts are ``apart``, with
a cable between their networks, the data go through shm. All processes end with the one that
started them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.environment import ONE_THREAD, environment
from support.places import TESTS
from support.requiring import lacking, require_programs
from support.starting import finished

PROGRAMS = TESTS / "launchers/programs"
WITHOUT_RANK_0 = [f"rank {rank} of 2 sums to 5" for rank in (1, 2)]  # of rank_0_is_killed.py
_NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def require() -> None:
    """Skip the test where there can be no hosts."""
    if os.geteuid() != 0:
        lacking("two hosts are namespaces, which only root may make")
    require_programs(ip="iproute2", unshare="util-linux")
    tried = subprocess.run(["unshare", *_NAMESPACES, "true"], check=False, capture_output=True)
    if tried.returncode != 0:
        lacking(f"no namespaces here: {tried.stderr.decode().strip()}")


def ranks(size: int) -> str:
    """Functions for a script: ``rank NUMBER COMMAND...``, and ``all COMMAND...``.

    The first half of the ranks is on node1.
    """
    return f"""
        rank() {{
          local number=$1; shift
          on "node$((number * 2 / {size} + 1))" env PGASDL_RANK="$number" PGASDL_SIZE={size} \\
            PGASDL_JOB_ID=apart PGASDL_STORE=node1:29500 "$@"
        }}
        all() {{
          local number jobs=()
          for number in {" ".join(map(str, range(size)))}; do
            rank "$number" "$@" & jobs+=($!)
          done
          ended "${{jobs[@]}}"
        }}
    """


def shell(folder: Path) -> Path:
    """A program in place of ssh, for launchers that a script starts; it exports ``on`` before."""
    path = folder / "far.sh"
    path.write_text(
        '#!/bin/bash\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
        'node=$1; shift\non "$node" bash -c "$*"\n'
    )
    path.chmod(0o755)
    return path


def run(
    folder: Path, script: str, timeout: float = 200, *, apart: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The end and the output of a script of ``hosts.sh``.

    It finds pgasdl's Python first on its path, and the secret of its jobs in the environment.
    """
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"], "/usr/sbin"])
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_bytes(os.urandom(32))
    (folder / "script.sh").write_text(script)
    prelude = [
        "bash",
        str(Path(__file__).with_name("hosts.sh")),
        str(folder),
        str(folder / "script.sh"),
        *(["apart"] if apart else []),
    ]
    return finished(
        ["unshare", *_NAMESPACES, *prelude],
        env=environment(**ONE_THREAD, PATH=path, PGASDL_SECRET_FILE=str(secret), **variables),
        timeout=timeout,
    )


def succeeded(
    folder: Path, script: str, timeout: float = 200, *, apart: bool = False, **variables: str
) -> str:
    """Standard output of a script that has to end well."""
    done = run(folder, script, timeout, apart=apart, **variables)
    assert done.returncode == 0, f"{done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout
