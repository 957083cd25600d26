"""Hooks that DistributedDataParallel has built in, as C++ code, over process groups of ours."""

from __future__ import annotations

import functools
from typing import Any

from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel


def replace(kind: type) -> None:
    """Let DistributedDataParallel use its hook in Python for the built-in one, where it has to.

    The built-in hook for float16 wants C++'s list of tensors from a future. No future that Python
    makes has one: its value is an object of Python's. ``kind``: the type of the process groups.
    """
    builtin: Any = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(builtin)
    def register(ddp: Any, comm_hook_type: BuiltinCommHookType) -> None:
        group = ddp.process_group
        if comm_hook_type == BuiltinCommHookType.FP16_COMPRESS and isinstance(group, kind):
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            ddp.register_comm_hook(group, fp16_compress_hook)
        else:
            builtin(ddp, comm_hook_type)

    DistributedDataParallel._register_builtin_comm_hook = register  # type: ignore[method-assign]
