"""A build where every optional header is missing: it imports, runs, and says what it lacks.

The first build on a machine takes a minute; it is kept in ``build/bare``. CI builds in a bare root,
too (``.ci/bare``): these tests find the same faults without one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.environment import environment
from support.starting import finished

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))
from building import ROOT, missing_tools, run, tool

pytestmark = [pytest.mark.timeout(1200), pytest.mark.full]

# Headers that a developer's machine has and a bare one lacks. Each is hidden by an #error.
OPTIONAL = ("infiniband/verbs.h", "infiniband/mlx5dv.h", "rdma/rdma_cma.h", "mpi.h", "numa.h")
WHY = "verbs was not built in: <infiniband/verbs.h> was missing"
PROGRAM = """
import numpy as np
import pgasdl
with pgasdl.init() as ctx:
    numbers = np.full(1000, ctx.rank + 1, np.float32)
    ctx.allreduce(numbers, op="sum")
    print("sum", numbers[-1], flush=True)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the package of such a build."""
    if missing := missing_tools():
        pytest.skip(f"not installed: {', '.join(missing)}")
    cmake, ninja = tool("cmake"), tool("ninja")
    assert cmake is not None and ninja is not None
    build = ROOT / "build" / "bare"
    hidden, place = build / "hidden", tmp_path_factory.mktemp("bare")
    for name in OPTIONAL:
        (hidden / name).parent.mkdir(parents=True, exist_ok=True)
        (hidden / name).write_text("#error this header is optional, and hidden\n")
    run(
        cmake, "-S", str(ROOT / "native"), "-B", str(build), "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={sys.executable}",
        "-DPGASDL_UNITY=ON", "-DPGASDL_WERROR=ON",
        "-DCMAKE_BUILD_TYPE=Quick", f"-DCMAKE_CXX_FLAGS=-O0 -I{hidden}",
    )  # fmt: skip
    run(cmake, "--build", str(build))
    ignored = shutil.ignore_patterns("_native*.so", "__pycache__")
    shutil.copytree(ROOT / "pgasdl", place / "pgasdl", ignore=ignored)
    run(cmake, "--install", str(build), "--prefix", str(place))
    return place


def command(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return finished(
        [sys.executable, "-P", *arguments],
        env=environment(PYTHONPATH=str(place)),
        timeout=120,
        cwd=place,
    )


def test_it_imports_and_lacks_nothing_else(place: Path) -> None:
    words = "import json, pgasdl; from pgasdl import _native; print(pgasdl.__file__); "
    done = command(place, "-c", words + "print(json.dumps(_native.transports()))")
    assert done.returncode == 0, done.stderr
    file, table = done.stdout.splitlines()
    assert Path(file).is_relative_to(place)
    lacking = {name: why for name, why in json.loads(table).items() if why}
    assert lacking.keys() == {"verbs"} and WHY in lacking["verbs"]


def test_ranks_run(place: Path) -> None:
    done = command(place, "-m", "pgasdl", "run", "-n", "2", "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3.0") == 2


def test_whoever_asks_for_verbs_is_told(place: Path) -> None:
    run_verbs = ("-m", "pgasdl", "run", "-n", "2", "--transport", "verbs", "-c", PROGRAM)
    done = command(place, *run_verbs)
    assert done.returncode == 1
    for rank in (0, 1):
        told = next(
            line
            for line in done.stderr.splitlines()
            if line.startswith(f"[{rank}] pgasdl.errors.UnavailableError: ")
        )
        assert WHY in told and "libibverbs-dev" in told


def test_the_survey_raises_the_same(place: Path) -> None:
    done = command(
        place, "-c", "from pgasdl import _native as n; n.verbs_devices(n.VerbsOptions())"
    )
    assert done.returncode == 1
    assert f"UnavailableError: {WHY}" in done.stderr


def test_doctor_and_topo_say_what_to_do(place: Path) -> None:
    done = command(place, "-m", "pgasdl", "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = next(f for f in json.loads(done.stdout) if f["name"] == "verbs transport")
    assert found["status"] == "WARN" and WHY in found["detail"]
    assert "apt-get install libibverbs-dev, then build again" in found["fix"]
    topo = command(place, "-m", "pgasdl", "topo")
    assert topo.returncode == 0 and WHY in topo.stdout and found["fix"] in topo.stdout
