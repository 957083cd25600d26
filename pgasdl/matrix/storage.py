"""Matrices in checkpoints: each rank writes its blocks, and reads those of any other layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pgasdl.checkpoint import Checkpoints, Shard, Sharded
from pgasdl.errors import BufferRefusedError
from pgasdl.group import Group
from pgasdl.matrix.array import DistributedArray, make, require_same_space
from pgasdl.matrix.layout import Layout
from pgasdl.matrix.serving import Local, served
from pgasdl.matrix.space import space_of

if TYPE_CHECKING:
    from pgasdl.context import Context

_VECTORS = "vectors"  # beside the caller's state: a vector is stored as a column


def save(
    checkpoints: Checkpoints,
    iteration: int,
    arrays: dict[str, DistributedArray],
    state: dict[str, Any] | None = None,
    *,
    timeout: float | None = None,
) -> None:
    """Write matrices and vectors into a checkpoint, each rank its blocks. Collective.

    Parameters
    ----------
    checkpoints : Checkpoints
        The folder, the same for all ranks.
    iteration : int
        0 <= iteration.
    arrays : dict[str, DistributedMatrix or DistributedVector]
        By name, at least one; all of one group.
    state : dict, optional
        What else belongs to it, as for :meth:`pgasdl.checkpoint.Checkpoints.save`; that of the
        group's first rank is stored.
    timeout : float, optional
        Seconds that the slowest rank may write; None: the context's default.

    Raises
    ------
    CheckpointError
        A rank could not write. All raise it; the checkpoints before stay as they are.
    LayoutError
        The matrices are of different groups.
    PeerLostError, PgasTimeoutError, UnavailableError
    """
    if not arrays:
        raise BufferRefusedError("a checkpoint of no matrix: Checkpoints.save writes a state alone")
    _save(checkpoints, iteration, arrays, Local(state or {}), timeout)


@served
def _save(
    checkpoints: Checkpoints,
    iteration: int,
    arrays: dict[str, DistributedArray],
    state: Local,
    timeout: float | None,
) -> None:
    members = list(arrays.values())
    require_same_space(*members)
    shards = [
        Shard(name, array.layout.shape, block.row, block.column, mine)
        for name, array in arrays.items()
        for block, mine in array.kept()
    ]
    for name, array in arrays.items():
        if not array.size and array.space.rank == 0:  # nobody has a block
            shards.append(
                Shard(name, array.layout.shape, 0, 0, array.flat.reshape(array.layout.shape))
            )
    vectors = [name for name, array in arrays.items() if array.ndim == 1]
    group = members[0].space.group
    checkpoints.save_sharded(
        iteration,
        {_VECTORS: vectors, "state": state.value},
        shards,
        lambda blob: group.allgather("a checkpoint of matrices", blob, timeout),
    )


@served
def load(where: Context | Group, found: Sharded, name: str, layout: Layout | str = "rows") -> Any:
    """Read a matrix or vector out of a checkpoint; each rank reads only its own blocks.

    Parameters
    ----------
    where : Context or Group
        The ranks; there may be more or fewer than those that wrote.
    found : Sharded
        :meth:`pgasdl.checkpoint.Checkpoints.open_last` returns it.
    name : str
        Which one.
    layout : Layout or str, default "rows"
        As for :func:`empty`; any one.

    Raises
    ------
    KeyError
        There is none of this name.
    CheckpointError
        A file cannot be read any more.
    """
    shape, vectors = found.shape(name), found.state()[_VECTORS]
    space = space_of(where)
    ndim = 1 if name in vectors else 2
    made = make(ndim, space, space.layout(shape, layout), found.dtype(name))
    for block, mine in made.blocks():
        mine[...] = found.read(name, *block.where)
    return made


def load_state(found: Sharded) -> dict[str, Any]:
    """Return the state that :func:`save` stored beside matrices."""
    state: dict[str, Any] = found.state()["state"]
    return state
