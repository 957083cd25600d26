"""What the gate (`run`) and the lanes (`full`) share: one at a time, tests, results.

Caches lie in ``$XDG_CACHE_HOME/pgasdl/ci`` (``~/.cache`` by default), outside every checkout, and
so does the file of results, to which one line of JSON is added before and after each lane.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "pgasdl", "ci")
RESULTS = CACHE / "results.jsonl"
SECOND_LOOKS = 5  # more failed tests are no chance

# What must not pass the second time: wrong numbers, crashes, reports of sanitizers.
DEFECT = re.compile(
    r"Mismatched elements|rrays are not |Tensor-likes are not|array_equal|allclose|method equal"
    r"|np\.False_|^assert (\[[-\d]|b['\"]|array|tensor).*==|\bwrong (sum|bits|value|number|result)"
    r"|[1-9]\d* of \d+ differ"
    r"|Sanitizer|runtime error: "
    r"|Segmentation fault|Bus error|core dumped|Fatal Python error|terminate called"
    r"|signal (4|6|7|8|11)\b|SIG(ILL|ABRT|BUS|FPE|SEGV)|(status|with|code|assert) -(4|6|7|8|11)\b",
    re.MULTILINE,
)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wait until no other gate and no other lane runs on this machine."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waits for another run of .ci on this machine", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install_packages(*names: str) -> None:
    """Install those of Debian's packages that are missing; apt is not asked if none is."""
    known = subprocess.run(["dpkg-query", "-W", "-f", "${Package} ${Status}\n", *names],
                           capture_output=True, text=True, check=False)  # fmt: skip
    installed = {
        line.split()[0] for line in known.stdout.splitlines() if line.endswith(" installed")
    }
    missing = [name for name in names if name not in installed]
    if missing:
        apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
        apt = apt if os.geteuid() == 0 else ["sudo", *apt]
        subprocess.run([*apt, "update"], check=True)
        subprocess.run([*apt, "install", "-y", "--no-install-recommends", *missing], check=True)


def tree(root: Path) -> str:
    """The hash of what the checkout's commit holds."""
    return git(root, "rev-parse", "HEAD^{tree}").strip()


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-c", "safe.directory=*", *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


def hash_of(root: Path, paths: Sequence[str]) -> str:
    """A hash of the files below these paths, as they lie there."""
    digest = hashlib.sha256()
    for name in sorted(git(root, "ls-files", "-co", "--exclude-standard", *paths).splitlines()):
        file = root / name
        digest.update(f"{name}\n".encode() + (file.read_bytes() if file.is_file() else b""))
    return digest.hexdigest()[:16]


def variables(root: Path, environment: Path) -> dict[str, str]:
    """Of commands in a virtual environment: tested versions, compiled objects from the cache."""
    left_out = ("CI", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")  # pytest keeps rewritten tests
    kept = {name: text for name, text in os.environ.items() if name not in left_out}
    return kept | {
        "VIRTUAL_ENV": str(environment),
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(root / ".ci" / "constraints.txt"),
        "CMAKE_CXX_COMPILER_LAUNCHER": "ccache",
        "CCACHE_BASEDIR": str(root),
        "CCACHE_NOHASHDIR": "1",  # two checkouts have the same objects
        "MYPY_CACHE_DIR": str(CACHE / "mypy"),
    }


def run(command: str, root: Path, env: dict[str, str], timeout: float) -> tuple[int, str]:
    """Run a line of bash, show its output; return its status and that output.

    When time is up, or the line has ended, what is left of its process group is killed.
    """
    print(f"$ {command}", flush=True)
    process = subprocess.Popen(["bash", "-euo", "pipefail", "-c", command], cwd=root, env=env,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    assert process.stdout is not None
    lines: list[str] = []

    def show(stream: Iterable[bytes]) -> None:
        for line in stream:
            lines.append(line.decode(errors="replace"))
            print(lines[-1], end="", flush=True)

    reader = threading.Thread(target=show, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        status = process.wait(timeout)
    except subprocess.TimeoutExpired:
        status = 124
        print(f"not ended after {timeout:g} s", flush=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(10)  # processes that left the group may hold the pipe
    return status, "".join(lines)


@dataclass
class Failure:
    """A test that failed.

    Attributes
    ----------
    name : as pytest takes it; empty: nothing that could be run once more
    text : what pytest says of it
    """

    name: str
    text: str

    @property
    def line(self) -> str:
        return next((line for line in self.text.splitlines() if line.strip()), "")[:200]

    @property
    def is_defect(self) -> bool:
        return not self.name or DEFECT.search(self.text) is not None


@dataclass
class Outcome:
    """How a step or a lane ended; ``failed`` and ``flaky`` are lines for the closing table."""

    passed: int = 0
    failures: list[Failure] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def result(self) -> str:
        if self.failed or self.failures:
            return "failed"
        return "flaky" if self.flaky else "passed" if self.passed else "failed"


def command(line: str, root: Path, env: dict[str, str], timeout: float) -> Outcome:
    """A line of bash that is right if it ends with 0."""
    status, _ = run(line, root, env, timeout)
    return Outcome(failed=[f"`{line}` ended with {status}"]) if status else Outcome(passed=1)


def tests(
    line: str, root: Path, env: dict[str, str], report: Path, seed: int, timeout: float
) -> Outcome:
    """A line of bash that calls pytest: what the tests' report says, and the line's status."""
    options = (f"--timeout=120 --hypothesis-profile=gate --randomly-seed={seed} "
               f"-p no:cacheprovider -q -rfE --junitxml={report}")  # fmt: skip
    report.unlink(missing_ok=True)
    status, _ = run(line, root, env | {"PYTEST_ADDOPTS": options}, timeout)
    outcome = Outcome()
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            _add(outcome, case)
    if status not in (0, 1) or bool(status) != bool(outcome.failures):
        outcome.failed.append(f"`{line}` ended with {status}")
    return outcome


def _add(outcome: Outcome, case: ElementTree.Element) -> None:
    found = [part for part in case if part.tag in ("failure", "error")]
    skip = case.find("skipped")
    module, name = case.get("classname", "").replace(".", "/"), case.get("name", "")
    if found:
        text = "\n".join(_said(part) for part in found)
        outcome.failures.append(Failure(f"{module}.py::{name}" if module else "", text))
    elif skip is not None:
        why = skip.get("message", "")
        outcome.skipped[why] = outcome.skipped.get(why, 0) + 1
    else:
        outcome.passed += 1


def _said(part: ElementTree.Element) -> str:
    """The error's message without the sources that pytest shows around it."""
    said = [line[1:].strip() for line in (part.text or "").splitlines() if line.startswith("E ")]
    return "\n".join(said) or part.get("message", "") or (part.text or "")


def second_look(outcome: Outcome, root: Path, env: dict[str, str], report: Path, seed: int) -> None:
    """Run failed tests once more, each alone; one that passes is told, and fails nothing."""
    again, outcome.failures = outcome.failures, []
    if len(again) > SECOND_LOOKS:
        outcome.failed += [f"{failure.name}: {failure.line}" for failure in again]
        return
    for failure in again:
        told = f"{failure.name}: {failure.line}"
        if failure.is_defect:
            outcome.failed.append(told)
            continue
        line = f"pytest --full '{failure.name}'"
        if tests(line, root, env, report, seed, timeout=300).result == "passed":
            outcome.flaky.append(told)
            outcome.passed += 1
        else:
            outcome.failed.append(told)


def add_result(**entry: Any) -> None:
    """Add a line to the file of results."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps({"at": time.strftime("%F %T"), **entry}) + "\n")


def results() -> list[dict[str, Any]]:
    """All lines of the file of results."""
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return []


def new_environment(folder: Path) -> Path:
    """A virtual environment with nothing in it but pip."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


def kept_environment(name: str, digest: str, fill: Callable[[Path], None]) -> Path:
    """An environment in the cache, made by ``fill`` and kept until the digest changes."""
    folder = CACHE / f"{name}-{digest}"
    if not (folder / "complete").exists():
        for old in CACHE.glob(f"{name}-*"):
            shutil.rmtree(old)
        fill(new_environment(folder))
        (folder / "complete").touch()
    return folder


def extras(root: Path, *names: str) -> list[str]:
    """What extras of the package ask for, without the package itself."""
    with (root / "pyproject.toml").open("rb") as file:
        table = tomllib.load(file)["project"]["optional-dependencies"]
    return [f"'{wanted}'" for name in names for wanted in table[name] if "pgasdl" not in wanted]


def linters(root: Path) -> Path:
    """An environment with the linters, apart from what is tested."""

    def fill(folder: Path) -> None:
        line = f"pip install --quiet {' '.join(extras(root, 'lint'))}"
        if run(line, root, variables(root, folder), 300)[0]:
            sys.exit("no environment of linters")

    return kept_environment(
        "linters", hash_of(root, ["pyproject.toml", ".ci/constraints.txt"]), fill
    )
