"""Runs PyTorch's own tests of torch.distributed, each on ranks that are forks of this process.

    python torch_distributed.py BACKEND RANKS PATTERN FOLDER

Prints a line of JSON for each test: its name, how it ended, and why. They run as tests of gloo:
what PyTorch expects of gloo alone, it expects of BACKEND too.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

BACKEND, RANKS = sys.argv[1], int(sys.argv[2])
PATTERN = re.compile(sys.argv[3])
POSE = "gloo"
SECONDS = 100  # for one test, on a busy machine
GRACE_SECONDS = 5  # for the others, when one rank has failed
FOLDER = sys.argv[4]

os.environ.update(
    BACKEND=POSE,
    WORLD_SIZE=str(RANKS),
    MASTER_ADDR="127.0.0.1",
    INIT_METHOD=f"file://{FOLDER}/again",
    GLOO_SOCKET_IFNAME="lo",
    OMP_NUM_THREADS="1",
)

import torch  # noqa: E402
from torch import distributed  # noqa: E402
from torch.testing._internal.common_distributed import TEST_SKIPS, DistTestCases  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

REASONS = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


class Case(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """All tests that PyTorch has for every backend."""


def pose() -> None:
    """Let BACKEND be made wherever the tests make gloo."""

    def instead(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if named.get("backend") == POSE:
                named["backend"] = BACKEND
            return make(*given, **named)

        return call

    c10d = distributed.distributed_c10d
    c10d.init_process_group = distributed.init_process_group = instead(c10d.init_process_group)
    c10d.new_group = distributed.new_group = instead(c10d.new_group)
    # c10d.monitored_barrier asks for it. The tests ask distributed.get_backend whether there are
    # ranges in a profile, which only PyTorch's own backends make.
    told = c10d.get_backend
    c10d.get_backend = lambda group=None: told(group) and POSE
    for feature in ("ddp", "subgroup"):
        DistTestCases.backend_feature[feature].add(BACKEND)


def be_rank(rank: int, test: str, store: str, log: Any) -> None:
    """Run a test as one of its ranks; never returns."""
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    signal.alarm(SECONDS)  # whatever happens to the parent
    if test == "test_get_backend":
        distributed.get_backend = distributed.distributed_c10d.get_backend
    status = 1
    try:
        pipe = multiprocessing.Pipe()
        Case._run(rank, test, store, pipe[1])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def ended(pids: list[int]) -> list[int]:
    """Wait for all ranks, and return their statuses; end those that wait for one that failed."""
    status: dict[int, int] = {}
    deadline = time.monotonic() + SECONDS
    while len(status) < len(pids):
        for pid in set(pids) - status.keys():
            found, code = os.waitpid(pid, os.WNOHANG)
            if not found:
                continue
            status[pid] = os.waitstatus_to_exitcode(code)
            if status[pid] not in (0, *REASONS):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            for pid in set(pids) - status.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [status[pid] for pid in pids]


def run(test: str) -> dict[str, str]:
    """Run one test; say how it ended, and why."""
    distributed_test.initialize_temp_directories()
    distributed_test.Barrier.init()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{FOLDER}/again")
    with tempfile.TemporaryFile("w+") as log:
        pids = []
        for rank in range(RANKS):
            pid = os.fork()
            if pid == 0:
                be_rank(rank, test, f"{FOLDER}/{test}", log)
            pids.append(pid)
        status = ended(pids)
        log.seek(0)
        text = log.read()
    distributed_test.cleanup_temp_dir()
    worst = next((each for each in status if each not in (0, *REASONS)), max(status))
    if worst == 0:
        return {"test": test, "how": "passed", "why": ""}
    if worst in REASONS:
        given = re.search(r"for following reason: (.*)", text)
        return {"test": test, "how": "skipped", "why": given[1] if given else REASONS[worst]}
    return {"test": test, "how": "failed", "why": f"statuses {status}: {text[-6000:]}"}


def main() -> None:
    """Run what fits the pattern."""
    torch.set_num_threads(1)
    pose()
    for test in sorted(name for name in dir(Case) if name.startswith("test_")):
        if PATTERN.search(test):
            print(json.dumps(run(test)), flush=True)


if __name__ == "__main__":
    main()
