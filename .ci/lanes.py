"""``.ci/full [LANE ...] [--minutes N] [--status]``: everything that the gate leaves out, in lanes.

Each lane takes 15 minutes or less on two idle cores, and one runs at a time. A lane that has passed
on the same content of its paths is left out, so that a run that was cut off goes on where it was;
naming a lane runs it in any case. First come lanes that failed, then the others, the oldest first.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ci

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = "pytest --full -m 'full or gate'"  # by the README's `pytest`
LONGEST = 1500.0  # seconds until a lane is ended
# What every lane depends on, beside its own paths.
PRODUCT = ("pgasdl", "native", "pyproject.toml", ".ci/constraints.txt", "tests/support")

MPI = ("mpich", "libmpich-dev", "openmpi-bin")
# Tests may leave out these; whatever else is skipped in a lane fails it.
MAY_SKIP = re.compile(r"--seeds FROM:TO|PGASDL_SOAK")
GUESTS = ("ibverbs-utils", "ibverbs-providers", "python3-pyverbs", "busybox-static", "perftest")
SLURM = ("munge", "slurm-client", "slurmctld", "slurmd")
# One of each minor version of PyTorch that extra `torch` admits beside that of constraints.txt, and
# tests that cannot run there: 2.11 for CUDA, without a GPU, ends a process whose second thread
# makes fake tensors, as compiling does.
TORCH = {
    "2.11.0": "fake or make_fx or compiled_parts or a_compiled_model",
    "2.12.0": "",
    "2.14.1": "",
    "2.15.0": "",
}


@dataclass(frozen=True)
class Lane:
    """One lane.

    Attributes
    ----------
    line : of bash, in an environment of all tests; one that begins with pytest has a second look
    paths : beside the product's; if these are as they were, the lane need not run again
    packages : of Debian's
    torch : the version of PyTorch; empty: that of constraints.txt
    """

    name: str
    line: str
    paths: tuple[str, ...]
    packages: tuple[str, ...] = ()
    torch: str = ""

    def hash(self) -> str:
        """Of what it depends on, as it lies there now."""
        return ci.hash_of(ROOT, [*PRODUCT, *self.paths])


def contract(name: str, rows: str, *packages: str) -> Lane:
    """Some transports' rows of the contract suite."""
    line = f"{LEFT_OUT} tests/contract -k '{rows}'"
    return Lane(f"contract-{name}", line, ("tests/contract",), packages)


def folder(name: str, *packages: str, without: tuple[str, ...] = ()) -> Lane:
    """A folder of tests, without some of its files."""
    left_out = "".join(f" --ignore=tests/{name}/{file}" for file in without)
    line = f"{LEFT_OUT} tests/{name}{left_out}"
    return Lane(name.replace("_", "-"), line, (f"tests/{name}", "apps"), packages)


def with_torch(version: str, left_out: str) -> Lane:
    """All that uses PyTorch on CPUs, but PyTorch's own tests, in another version of it."""
    files = "tests/training/test_torch_[!f]*.py --ignore-glob='*_gpu.py'"
    names = " or ".join(filter(None, ("pytorchs_own", left_out)))
    line = f"pytest --full -n 2 {files} -k 'not ({names})'"
    return Lane(f"torch-{version}", line, ("tests/training",), torch=version)


def guests_contract(name: str, rows: str, *options: str) -> Lane:
    """Rows of the contract suite over verbs, all in one guest; ``options`` of guest.py."""
    line = (
        f"python tests/softroce/guest.py {' '.join(['--mode rails --memory 4096', *options])}"
        " -e CI=true -t 1400 -- "
        f"'pytest --full -n 0 tests/contract -k \"{rows}\" -q -p no:cacheprovider -rs'"
        f" | tee build/{name}.log && grep -Eq '^[1-9][0-9]{{2,}} passed' build/{name}.log"
    )
    return Lane(name, line, ("tests/contract", "tests/softroce"), GUESTS)


LANES = (
    contract("local", "not verbs and not adversary and not mpich and not openmpi"),
    contract("adversary", "adversary"),
    contract("mpich", "mpich and not debian"),
    contract("openmpi", "openmpi and not debian"),
    contract("debian", "debian", *MPI),
    folder("plans", without=("test_plans_spin.py",)),
    Lane("spin", f"{LEFT_OUT} tests/plans/test_plans_spin.py", ("tests/plans",), ("spin",)),
    folder("mpi", *MPI),
    folder(
        "training",
        without=("test_torch_distributed.py", "test_torch_frameworks.py", "test_torch_ft.py"),
    ),
    Lane("torch", f"{LEFT_OUT} tests/training/test_torch_distributed.py", ("tests/training",)),
    Lane(
        "frameworks",
        "pip install --quiet accelerate lightning torchft-nightly parameterized expecttest"
        f" && {LEFT_OUT} -q tests/training/test_torch_f*.py",
        ("tests/training",),
    ),
    *(with_torch(*each) for each in TORCH.items()),
    folder("failure"),
    folder("tcp", "iproute2"),
    folder("gpu"),
    folder("unit", without=("test_native.py", "test_topo.py")),
    folder("simulate", "libsimgrid-dev"),
    folder("launchers", "iproute2", *SLURM),
    folder("jobs", "chromium", "iproute2", *SLURM),
    Lane("native-thread", f"{LEFT_OUT} tests/unit/test_native.py", ("tests/native", "tests/gpu")),
    Lane(
        "native-address", "python tests/native/building.py address", ("tests/native", "tests/gpu")
    ),
    folder("random_programs", *MPI),
    folder("fuzz", "clang", "libclang-rt-dev"),
    Lane("kernel", "python tests/softroce/kernel.py", ("tests/softroce/kernel.py",)),
    Lane("softroce", f"{LEFT_OUT} -n 0 tests/softroce", ("tests/softroce", "apps"), GUESTS),
    Lane(
        "guests",
        f"{LEFT_OUT} -n 0 tests/verbs tests/unit/test_topo.py",
        ("tests/verbs", "tests/softroce", "apps"),
        (*GUESTS, *SLURM),
    ),
    guests_contract("verbs-contract", "verbs and not completion"),
    guests_contract("verbs-completion", "verbs-completion"),
    # Flags, each held for a moment between two stores to its word if it is written.
    guests_contract(
        "verbs-held",
        "verbs and not rails and not gpu and (late or notifications or passive or counts or reset)",
        "--hold 2000",
    ),
    Lane("bare-bookworm", ".ci/bare bookworm", ("tests", "apps", ".ci"), ("debootstrap",)),
    Lane(
        "bare-trixie", ".ci/bare trixie --without-torch", ("tests", "apps", ".ci"), ("debootstrap",)
    ),
    Lane(
        "wheels",
        "docker/build-wheels.sh build/wheels && .ci/bare bookworm --wheels build/wheels"
        " && .ci/bare trixie --wheels build/wheels && .ci/bare noble --wheels build/wheels",
        ("docker", "apps", ".ci"),
        ("debootstrap",),
    ),
    Lane(
        "modules",
        'export COVERAGE_FILE="$PWD"/build/coverage/data'
        " && rm -rf build/coverage && mkdir -p build/coverage"
        ' && coverage run "$(command -v pytest)" --full -m "not full" -q'
        " && coverage combine --quiet"
        " && coverage json --quiet -o - | python .ci/idle_modules.py",
        ("tests", "apps"),
    ),
)


def last(name: str) -> dict[str, Any]:
    """The last line about a lane in the file of results; of one that was cut off, that."""
    entries = [entry for entry in ci.results() if entry["lane"] == name]
    if not entries:
        return {"result": "never run", "at": ""}
    return entries[-1] | ({"result": "interrupted"} if entries[-1]["result"] == "begun" else {})


def has_passed(lane: Lane) -> bool:
    """Whether it has passed on what lies in its paths now; flaky tests are told, and pass."""
    entry = last(lane.name)
    return entry["result"] in ("passed", "flaky") and entry["hash"] == lane.hash()


def in_order(lanes: list[Lane]) -> list[Lane]:
    """Those that failed or were cut off, then changed ones, the oldest first."""
    again = ("failed", "interrupted")
    return sorted(
        lanes, key=lambda lane: (last(lane.name)["result"] not in again, last(lane.name)["at"])
    )


def with_kernel(lanes: list[Lane]) -> list[Lane]:
    """These lanes, and before those with guests the one that builds their kernel, unless it has."""
    (kernel,) = (lane for lane in LANES if lane.name == "kernel")
    guests = any(set(GUESTS) <= set(lane.packages) for lane in lanes)
    return [kernel, *lanes] if guests and kernel not in lanes and not has_passed(kernel) else lanes


def status() -> str:
    """A line for each lane: how it last ended, when, on which commit, and what is wrong."""
    rows = []
    for lane in LANES:
        entry = last(lane.name)
        changed = entry["at"] and entry["hash"] != lane.hash()
        cells = f"{lane.name:<18} {entry['result']:<12} {entry.get('seconds', ''):>5}"
        cells += f" {entry.get('commit', ''):<10} {entry['at']:<20}"
        rows.append((cells + ("changed since" if changed else "")).rstrip())
        rows += [f"  FAILED {line}" for line in entry.get("failed", ())]
        rows += [f"  FLAKY {line}" for line in entry.get("flaky", ())]
    return "\n".join(rows)


def environment() -> Path:
    """One with all extras and the package as it is now, kept until that changes."""

    def fill(folder: Path) -> None:
        ci.install_packages("ccache", "g++", "libibverbs-dev", "libmpich-dev", "python3-venv")
        wanted = " ".join(ci.extras(ROOT, "launchers", "browser", "docs", "lint", "gpu"))
        lines = (
            "pip install --quiet '.[test]'",
            f"pip install --quiet atheris coverage {wanted}",
            # For Debian's MPICH, whose library mpi4py's wheels do not load. Not where the headers
            # of PyPI's MPICH would be found first, nor from pip's cache, which may hold such a one.
            f"python -m venv {folder}/plain && CFLAGS=-O0 MPICC=mpicc.mpich {folder}/plain/bin/pip"
            " install --quiet --no-cache-dir --no-binary mpi4py"
            f" --target {folder}/mpi4py mpi4py",
        )
        for line in lines:
            if ci.run(line, ROOT, ci.variables(ROOT, folder), 1200)[0]:
                sys.exit("full: no environment of tests")

    digest = ci.hash_of(ROOT, ["pgasdl", "native", "pyproject.toml", ".ci/constraints.txt"])
    return ci.kept_environment("environment", digest, fill)


def torch_folder(version: str) -> Path:
    """A folder with PyTorch of a version, with all that it asks for; one of them is kept.

    Neither pip's settings nor the pins count: on some machines they admit no newer one.
    """

    def fill(folder: Path) -> None:
        env = ci.variables(ROOT, folder) | {"PIP_CONFIG_FILE": os.devnull, "PIP_CONSTRAINT": ""}
        line = f"pip install --quiet --no-cache-dir --target {folder / 'packages'} torch=={version}"
        if ci.run(line, ROOT, env, 1200)[0]:
            sys.exit(f"full: no PyTorch {version}")

    return ci.kept_environment("torch", version, fill) / "packages"


def run(lane: Lane) -> bool:
    """Run a lane, and add how it ended to the results; whether it passed."""
    print(f"\n===== {lane.name}", flush=True)
    folder = environment()
    ci.install_packages(*lane.packages)
    commit = ci.git(ROOT, "rev-parse", "--short", "HEAD").strip()
    entry = {"lane": lane.name, "commit": commit, "hash": lane.hash()}
    ci.add_result(**entry, result="begun")
    began = time.monotonic()
    env = ci.variables(ROOT, folder)
    env |= {"CI": "true", "MPI4PY_OF_DEBIAN_MPICH": f"{folder}/mpi4py"}
    if lane.torch:
        env["PYTHONPATH"] = str(torch_folder(lane.torch))  # ranks find it before the other, too
    seed = int(ci.tree(ROOT)[:7], 16)
    if lane.line.startswith("pytest"):
        with tempfile.TemporaryDirectory(prefix="pgasdl-full.") as work:
            outcome = ci.tests(lane.line, ROOT, env, Path(work, "tests.xml"), seed, LONGEST)
            ci.second_look(outcome, ROOT, env, Path(work, "again.xml"), seed)
        for why, number in outcome.skipped.items():
            if not MAY_SKIP.search(why):
                outcome.failed.append(f"skipped {number} times: {why}")
    else:
        outcome = ci.command(lane.line, ROOT, env, LONGEST)
    outcome.seconds = time.monotonic() - began
    ci.add_result(
        **entry,
        result=outcome.result,
        seconds=round(outcome.seconds),
        tests=outcome.passed,
        failed=outcome.failed,
        flaky=outcome.flaky,
        skipped=outcome.skipped,
        seed=seed,
    )
    return not outcome.failed


def main() -> int:
    parser = argparse.ArgumentParser(prog=".ci/full", description=__doc__)
    parser.add_argument(
        "lanes", nargs="*", choices=[[], *(lane.name for lane in LANES)], metavar="LANE"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start nothing that takes longer"
    )
    parser.add_argument("--status", action="store_true", help="print how the lanes last ended")
    arguments = parser.parse_args()
    if arguments.status:
        print(status())
        return 0
    end = time.monotonic() + 60 * arguments.minutes
    chosen = [lane for lane in LANES if lane.name in arguments.lanes]
    chosen = with_kernel(chosen) or in_order([lane for lane in LANES if not has_passed(lane)])
    passed = failed = 0
    with ci.alone():
        for lane in chosen:
            if time.monotonic() + last(lane.name).get("seconds", 900) > end:
                print(f"\n===== {lane.name}: no time left for it")
                continue
            if run(lane):
                passed += 1
            else:
                failed += 1
    print("\n" + status())
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
