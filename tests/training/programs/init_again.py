"""Process groups in one store after the other, of which rank 1 always leaves first.

``init_again.py FOLDER`` with the variables of init method "env://". Before rank 0 has left a group,
rank 1 has come to the store in which it makes the next one.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from pgasdl.torch.backend.group import ProcessGroup

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
EACH = 3
SECONDS = 30

n_come = 0  # how often rank 1 has come to a store


def come() -> None:
    """Tell rank 0 that this rank has come once more, if it is rank 1."""
    global n_come  # noqa: PLW0603
    n_come += 1
    if RANK == 1:
        (FOLDER / str(n_come)).touch()


def told(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes a store, and tells that this rank has come there."""

    def made(*arguments: Any, **options: Any) -> Any:
        store = make(*arguments, **options)
        come()
        return store

    return made


def late(end: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return what ends a group on rank 0 once rank 1 has come to the next store."""

    def ended(group: Any) -> None:
        end(group)
        deadline = time.monotonic() + SECONDS
        while not (FOLDER / str(n_come + 1)).exists():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    return ended


def main() -> None:
    """Meet in PyTorch's TCPStore, in a file, and in a TCPStore of the program's own."""
    torch.set_num_threads(1)
    if RANK == 0:
        ProcessGroup.shutdown = late(ProcessGroup.shutdown)  # type: ignore[method-assign]
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    rendezvous.TCPStore = told(rendezvous.TCPStore)
    rendezvous.FileStore = told(rendezvous.FileStore)
    own = None
    for turn in range(3 * EACH):
        place: dict[str, Any] = {"rank": RANK, "world_size": 2}
        if turn // EACH == 1:
            place["init_method"] = f"file://{FOLDER}/store"
        elif turn // EACH == 2:
            if own is None:
                port = int(os.environ["MASTER_PORT"])
                own = distributed.TCPStore("127.0.0.1", port, 2, RANK == 0, multi_tenant=True)
            place["store"] = own
            come()
        distributed.init_process_group("pgasdl", timeout=timedelta(seconds=SECONDS), **place)
        most = torch.tensor([RANK])
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
        assert most == 1
        if turn == 3 * EACH - 1 and RANK == 1:
            come()
        distributed.destroy_process_group()
    assert "torch._dynamo" not in sys.modules  # the compiler, which takes seconds
    sys.stdout.write("right\n")


if __name__ == "__main__":
    main()
