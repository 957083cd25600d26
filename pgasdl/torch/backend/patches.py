"""Functions of PyTorch that do not take process groups of ours, replaced by ones that do."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import distributed
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel

c10d: Any = distributed.distributed_c10d


def require_ranks(ranks: Sequence[int], size: int) -> list[int]:
    """Return the ranks of a part in rising order; refuse those that a group of ``size`` has not."""
    members = sorted(ranks)
    if not members or len(set(members)) < len(members) or not 0 <= members[0] <= members[-1] < size:
        raise ValueError(
            f"ranks {list(ranks)}: give one or more of 0 to {size - 1}, each once: places in the "
            "group that is split"
        )
    return members


def replace_split_group(kind: Any, name: str) -> None:
    """Let ``split_group`` split groups of ``kind``, which is backend ``name``.

    PyTorch's own refuses whatever lies on no accelerator, with gloo, too, before it asks the group.
    """
    split: Any = c10d.split_group

    @functools.wraps(split)
    def split_group(
        parent_pg: Any = None,
        split_ranks: list[list[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        backend: str | None = None,
    ) -> Any:
        parent = parent_pg or c10d._get_default_group()
        if not isinstance(parent, kind):
            return split(parent_pg, split_ranks, timeout, pg_options, group_desc, backend)
        places = c10d._world.pg_group_ranks.get(parent)
        if places is None:
            raise ValueError(f"{parent} was destroyed, or torch.distributed did not make it")
        if backend not in (None, name):
            raise ValueError(f"backend {backend!r}: a part of a group of {name!r} is one, too")
        parts = [require_ranks(ranks, parent.size()) for ranks in split_ranks or []]
        everybody = [rank for ranks in parts for rank in ranks]
        if not parts or len(set(everybody)) < len(everybody):
            raise ValueError(f"split_ranks {split_ranks}: give lists of ranks, each rank in one")
        # All ranks of the parent count all splits.
        label = f"{parent.group_name}:split:{parent.count_split()}"
        ranks = next((each for each in parts if parent.rank() in each), None)
        if ranks is None:
            return None
        label = f"{label}:{ranks[0]}"
        group = parent.split_group(ranks, timeout, pg_options, label, group_desc or label)
        numbers = {place: number for number, place in places.items()}
        # As c10d._register_pg_in_world, which came with PyTorch 2.13.
        world, of, tag = c10d._world, distributed.Backend(name), f"ptd:{label}"
        world.pg_map[group] = of, c10d.PrefixStore(f"{label}/", world.pg_map[parent][1])
        world.pg_names[group] = label
        world.pg_backend_config[group] = str(c10d.BackendConfig(of))
        world.pg_group_ranks[group] = {numbers[rank]: place for place, rank in enumerate(ranks)}
        world.tags_to_pg.setdefault(tag, []).append(group)
        world.pg_to_tag[group] = tag
        c10d._register_process_group(label, group)
        return group

    c10d.split_group = distributed.split_group = split_group


def replace_flight_recorder(kind: type) -> None:
    """Let PyTorch 2.15 or newer record no process group of ``kind``.

    Its recorder asks C++ for the group's name, which is an error where Python made the group.
    """
    attach: Any = getattr(c10d, "_maybe_attach_flight_recorder", None)
    if attach is None:
        return

    @functools.wraps(attach)
    def attach_to_others(pg: Any, *given: Any, **named: Any) -> None:
        if not isinstance(pg, kind):
            attach(pg, *given, **named)

    c10d._maybe_attach_flight_recorder = attach_to_others


def replace_builtin_hook(kind: type) -> None:
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
