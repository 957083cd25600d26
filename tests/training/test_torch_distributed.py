"""The backend of torch.distributed under PyTorch's own tests, and under ordinary programs."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jobs
import pytest
from support import starting
from support.environment import environment
from support.launcher import torchrun
from support.patience import PATIENCE
from tiers import full

torch = pytest.importorskip("torch")

# Those of PyTorch's own tests that cannot pass here, nor over gloo, and why.
NOT_HERE = {
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_all_to_all_cuda": "needs a GPU, and does not say so",
    "test_all_to_all_cuda_complex": "needs a GPU, and does not say so",
    "test_all_to_all_full_group_cuda": "needs a GPU, and does not say so",
    "test_batch_isend_irecv_mixed_backend_err": "needs NCCL",
    "test_batch_isend_irecv_op_err": "needs a GPU, and does not say so",
    "test_all_to_all_group_cuda": "needs a GPU, and does not say so",
    "test_new_subgroups_with_group_param": "needs 4 ranks, and does not say so",
}
# Why PyTorch itself leaves tests out.
GPU = ("CUDA", "cuda", "GPU")
UPSTREAM = "https://github.com/pytorch/pytorch/"

# Parts of about equal time.
PARTS = {
    "3 ranks, a": (3, "^test_(D|S|_|a)"),
    "3 ranks, b to c": (3, "^test_[bc]"),
    "3 ranks, d": (3, "^test_d"),
    "3 ranks, e to z": (3, "^test_[e-z]"),
    "8 ranks": (8, "^test_(?!.*(full|cuda|new_sub)).*_group(_|$)|^test_monitored_barrier_[fw]"),
}
LEAST = {
    "3 ranks, a": 40,
    "3 ranks, b to c": 8,
    "3 ranks, d": 4,
    "3 ranks, e to z": 35,
    "8 ranks": 20,
}


def torch_tests(backend: str, ranks: int, pattern: str, folder: Path) -> list[dict[str, str]]:
    """Run those of PyTorch's tests that fit; return how each ended."""
    program = jobs.PROGRAMS / "torch_distributed.py"
    done = starting.finished(
        [sys.executable, str(program), backend, str(ranks), pattern, str(folder)],
        env=environment(),
        timeout=290,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("part", full(PARTS))
def test_pytorchs_own_tests(part: str, tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    ended = torch_tests("pgasdl", *PARTS[part], tmp_path)
    failed = {
        each["test"]: each["why"]
        for each in ended
        if each["how"] == "failed" and each["test"] not in NOT_HERE
    }
    assert not failed, "\n\n".join(f"{test}: {why}" for test, why in failed.items())
    passed = {each["test"] for each in ended if each["how"] == "passed"}
    assert not passed & NOT_HERE.keys(), "take these from the list"
    skipped = [each for each in ended if each["how"] == "skipped"]
    unclear = [
        each
        for each in skipped
        if not each["why"].startswith(UPSTREAM)
        and "see " + UPSTREAM not in each["why"]
        and "small world" not in each["why"]
        and not any(word in each["why"] for word in GPU)
    ]
    assert not unclear
    assert len(passed) >= LEAST[part]


WAYS = {"ddp": 1, "compiled": 5, "fsdp resumed mesh": 3}


@pytest.mark.full
def test_ranks_have_the_pytorch_of_this_process() -> None:
    """Also where a lane tests another one than that beside pgasdl."""
    command = [sys.executable, "-c", "import torch; print(torch.__version__)"]
    told = starting.succeeded(command, env=environment(jobs.HERE), timeout=100)
    assert told.strip() == torch.__version__


@pytest.mark.parametrize("ways", full(WAYS))
def test_programs_train_the_same_over_pgasdl_and_gloo(ways: str) -> None:
    """DDP, also compiled; FSDP2, a checkpoint of it, tensor parallel layers, DTensor."""
    program = jobs.PROGRAMS / "distributed_training.py"
    told: dict[str, dict[str, str]] = {}
    for backend in ("pgasdl", "gloo"):
        done = torchrun("--nproc-per-node=2", str(program), backend, *ways.split())
        assert done.returncode == 0, done.stdout + done.stderr
        told[backend] = dict(line.split(": ") for line in done.stdout.splitlines())
    values = told["pgasdl"]
    assert len(values) == WAYS[ways]
    for what, value in told["gloo"].items():
        assert float(values[what]) == pytest.approx(float(value), rel=1e-10)
    if "resumed" in ways:
        assert values["FSDP2"] == values["FSDP2, resumed"]


def test_pytorchs_helpers_train_the_same_over_pgasdl_and_gloo(forked: Callable[..., str]) -> None:
    """Hooks of DistributedDataParallel, join, ZeroRedundancyOptimizer, averaged models."""
    shown = forked(2, jobs.PROGRAMS / "torch_helpers.py", torchrun=True)
    assert shown.count("is right") == 10


ENDS = """
import time, torch, pgasdl.torch
from torch import distributed
distributed.init_process_group("pgasdl")
rank = distributed.get_rank()
time.sleep(rank)  # rank 0's callback is there before its tensor is reduced
work = distributed.all_reduce(torch.ones(5), async_op=True)
work.get_future().add_done_callback(lambda done: [time.sleep(1e-4) for _ in range(5000)])
if rank == 0:  # and another one waits for a call that the other rank does not make
    work.get_future().add_done_callback(lambda done: distributed.all_reduce(torch.ones(1)))
work.wait()
print(f"rank {rank} ends")
"""


@pytest.mark.gate
def test_python_ends_while_the_thread_is_in_pytorch(tmp_path: Path) -> None:
    """Nobody destroyed the group."""
    program = tmp_path / "ends.py"
    program.write_text(ENDS)
    done = torchrun("--nproc-per-node=2", str(program))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ends") == 2


LOSS = """
import os, sys, time, datetime, torch
from torch import distributed as dist
torch.set_num_threads(1)
place = {"init_method": f"file://{sys.argv[1]}", "rank": int(sys.argv[2]), "world_size": 3}
dist.init_process_group("pgasdl", timeout=datetime.timedelta(seconds=60), **place)
rank = dist.get_rank()
print("pid", rank, os.getpid(), flush=True)
try:
    while True:
        dist.all_reduce(torch.ones(1000))
        dist.broadcast(torch.ones(10), 0)
except dist.DistBackendError as error:
    print("told", rank, error, flush=True)
    sys.exit(0)
"""


@pytest.mark.full
def test_a_rank_that_is_killed_ends_the_others_waits(tmp_path: Path) -> None:
    program = tmp_path / "loss.py"
    program.write_text(LOSS)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(tmp_path / "store"), str(rank)],
            env=environment(), stdout=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        first = [rank.stdout.readline() for rank in ranks]  # type: ignore[union-attr]
        assert all(line.startswith("pid") for line in first)
        time.sleep(0.3)
        ranks[1].send_signal(signal.SIGKILL)
        for rank in (0, 2):
            shown, _ = ranks[rank].communicate(timeout=60)
            assert f"told {rank} pgasdl: PeerLostError: rank 1" in shown
            assert ranks[rank].returncode == 0
    finally:
        for each in ranks:
            each.kill()
            each.communicate()


def test_groups_are_made_one_after_the_other_in_one_store(tmp_path: Path) -> None:
    """Stores: PyTorch's own, a file's, and the program's; ranks leave at different times."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    program = [sys.executable, str(jobs.PROGRAMS / "init_again.py"), str(tmp_path)]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(starting.running(program, env=environment(**place, RANK=str(rank))))
            for rank in range(2)
        ]
        for rank in reversed(ranks):  # rank 0 waits for rank 1
            shown, errors = rank.communicate(timeout=PATIENCE)
            assert (rank.returncode, shown) == (0, "right\n"), errors[-3000:]


@pytest.mark.gate
def test_groups_that_are_made_and_destroyed_leave_nothing(forked: Callable[..., str]) -> None:
    shown = forked(2, jobs.PROGRAMS / "many_groups.py", 500, torchrun=True)
    assert shown.count("left nothing") == 2


OWN = """
import torch, pgasdl
from torch import distributed as dist
with pgasdl.init() as ctx:
    store = f"file://{STORE}"
    dist.init_process_group("pgasdl", store, rank=ctx.rank, world_size=ctx.size)
    t = torch.ones(3)
    dist.all_reduce(t)
    ctx.allreduce(t)
    other = dist.new_group([0], backend="pgasdl")
    if ctx.rank == 0:
        dist.all_reduce(t, group=other)
    assert dist.group.WORLD.context is ctx
    dist.destroy_process_group()
    assert not ctx.closed
    ctx.barrier()
    print(f"rank {ctx.rank}: {t.tolist()}")
"""


def test_it_shares_the_programs_own_context(forked: Callable[..., str], tmp_path: Path) -> None:
    program = tmp_path / "own.py"
    program.write_text(OWN.replace("{STORE}", str(tmp_path / "store")))
    shown: Any = forked(2, program)
    assert "rank 0: [4.0, 4.0, 4.0]" in shown and "rank 1: [4.0, 4.0, 4.0]" in shown


def test_dtensors_and_matrices_share_their_memory(forked: Callable[..., str]) -> None:
    shown = forked(2, jobs.PROGRAMS / "dtensor_matrix.py", torchrun=True)
    assert shown == "[0] same memory\n"
