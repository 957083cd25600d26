"""The ranks that a program means by one of torch's groups."""

from __future__ import annotations

import operator
from typing import Any, cast

from torch import distributed

from pgasdl.context import Context, current
from pgasdl.errors import ClosedError, RankError
from pgasdl.group import Group

Members = Group | Context | str | distributed.ProcessGroup


def members_of(group: Members) -> tuple[Context, Group]:
    """Return this rank's context and the group that is meant.

    ``group`` : a group; a context, for all ranks; or a group of torch.distributed, or its name,
    that holds all ranks by the same numbers (else RankError; ClosedError: there is no context)
    """
    if isinstance(group, Context):
        return group, group.world
    if isinstance(group, Group):
        return cast(Context, group.context), group
    if not isinstance(group, str | distributed.ProcessGroup):
        raise TypeError(f"a group is a pgasdl Group or Context, not {type(group).__name__}")
    context = own_context()
    if isinstance(group, str):
        resolve: Any = vars(distributed.distributed_c10d)["_resolve_process_group"]
        group = cast(distributed.ProcessGroup, resolve(group))
    ranks = distributed.get_process_group_ranks(group)
    if sorted(ranks) != list(range(context.size)) or distributed.get_rank() != context.rank:
        raise RankError(
            f"torch's group of ranks {ranks} is not all {context.size} ranks of this context, by "
            "the same numbers: pass ctx.group(...)"
        )
    return context, context.world


def own_context() -> Context:
    """Return this process's context; ClosedError if it has none."""
    context = current()
    if context is None:
        raise ClosedError(
            "this process has no open context: pgasdl.init() first, or pass the group"
        )
    return context


def index_of(member: int, size: int) -> int:
    """Return a member's number, checked."""
    index = operator.index(member)
    if not 0 <= index < size:
        raise RankError(f"rank {index}: ranks are 0 to {size - 1}")
    return index
