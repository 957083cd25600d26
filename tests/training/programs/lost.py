"""Rank 1 is lost, late or wrong, in each of the ways below; rank 0 is told, goes on, and ends.

Ranks are forks of this process: all that they need is imported once. They end as Python ends.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from pgasdl.torch import DDPState, ddp_hook

LONG = 60  # seconds, of whatever must not take longer
Step = Callable[[], Callable[[], Any]]  # makes the first part of a step, returns the second one
X = torch.ones(2, 4)
states: list[DDPState] = []


def ddp(hook: Callable[[DistributedDataParallel], Any]) -> Step:
    model = DistributedDataParallel(nn.Linear(4, 4))
    hook(model)
    return lambda: model(X).sum().backward


def with_state() -> Step:
    states.append(DDPState(dist.group.WORLD.context))  # type: ignore[attr-defined]
    return ddp(lambda model: model.register_comm_hook(states[0], ddp_hook))


def fsdp() -> Step:
    model = fully_shard(nn.Linear(4, 4), mesh=dist.init_device_mesh("cpu", (2,)))
    return lambda: model(X).sum().backward


def pipeline() -> Step:
    rank = dist.get_rank()
    stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss())
    return lambda: lambda: schedule.step(*([] if rank else [X]), **({"target": X} if rank else {}))


def reduced(x: Tensor) -> Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD) + 1


USERS: dict[str, Callable[[], Step]] = {
    "plain": lambda: ddp(lambda model: None),
    "float16": lambda: ddp(
        lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    ),
    "builtin": lambda: ddp(
        lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    ),
    "state": with_state,
    "fsdp": fsdp,
    "pipeline": pipeline,
    "functional": lambda: lambda: lambda: reduced(X).sum().item(),
    "compiled": lambda: lambda: lambda: torch.compile(reduced, backend="aot_eager")(X).sum().item(),
}


def kill() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def leave() -> NoReturn:
    raise ValueError("planned")


def wrong() -> None:
    dist.isend(torch.ones(3), 0)
    for state in states:
        state.average(torch.ones(3))
    with contextlib.suppress(dist.DistBackendError):
        dist.broadcast(torch.ones(3), 0)


HOWS: dict[str, Callable[[], Any]] = {
    "killed": kill,
    "raised": leave,
    "left": lambda: sys.exit(0),
    "gone": lambda: os._exit(0),
    "late": lambda: None,
    "aborted": lambda: None,
    "wrong": wrong,
}


def rank(number: int, user: str, how: str, store: str, told: int, go: int, goes: int) -> None:
    """Make a step, and a second one, whose second part rank 0 alone makes."""
    faulthandler.dump_traceback_later(LONG, exit=True)
    place = {"init_method": f"file://{store}", "rank": number, "world_size": 2}
    dist.init_process_group("pgasdl", timeout=datetime.timedelta(seconds=LONG), **place)
    group: Any = dist.group.WORLD
    step = USERS[user]()
    step()()
    finish = step()
    if number == 1:
        os.close(goes)
        os.read(go, 1)  # rank 0 is there, too
        HOWS[how]()
        os.read(go, 1)  # rank 0 has ended
        os._exit(0)
    if how == "late":
        group.set_timeout(datetime.timedelta(seconds=1))
    if how == "aborted":  # during the step, or before
        threading.Timer(0.3, group.abort).start()
    os.write(goes, b" ")
    try:
        finish()
    except Exception as error:
        os.write(told, f"{type(error).__name__}: {error}".encode())


def main() -> None:
    """Print how rank 0 ended, and what it was told, for each way."""
    torch.set_num_threads(1)
    user, folder, *hows = sys.argv[1:]
    for how in hows:
        heard, told = os.pipe()
        go, goes = os.pipe()
        pids = []
        for number in range(2):
            if (pid := os.fork()) == 0:
                rank(number, user, how, f"{folder}/{how}", told, go, goes)
                return
            pids.append(pid)
        for each in (told, go, goes):
            os.close(each)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps([how, codes[0], os.read(heard, 1 << 16).decode()]), flush=True)


main()
