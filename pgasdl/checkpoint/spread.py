"""Write a checkpoint by several ranks: a folder with a file of each, and an index.

A rank's file holds its blocks; ``state.safetensors`` holds the state that is the same on all ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pgasdl.checkpoint import one_file
from pgasdl.checkpoint.files import finish, sha256, sync, writing
from pgasdl.checkpoint.shard import Shard, ShardPlace, block_of, check
from pgasdl.checkpoint.state import digest, flatten
from pgasdl.errors import CheckpointError

Gather = Callable[[bytes], list[bytes]]

INDEX, STATE = "index.json", "state.safetensors"
FORMAT = {"format": "pgasdl sharded checkpoint", "version": 1}


def write(path: Path, state: dict[str, Any], shards: Iterable[Shard], gather: Gather) -> None:
    """Write the checkpoint. Collective; a step begins when all ranks have ended the one before."""
    mine = os.urandom(16)
    rank = gather(mine).index(mine)

    together = partial(_together, path, gather)
    with ExitStack() as until_named:
        work = together(lambda: _prepare(path, until_named) if rank == 0 else [])
        folder = path.parent / work[0] / path.name
        files = together(lambda: _write_files(folder, rank, state, shards))
        together(lambda: _publish(folder, path, files) if rank == 0 else [])


def _together(path: Path, gather: Gather, step: Callable[[], list[Any]]) -> list[Any]:
    """Take a step; return all ranks' results in a row, or raise on all ranks if one failed."""
    cause: Exception | None = None
    told: dict[str, Any]
    try:
        told = {"result": step()}
    except Exception as error:
        cause, told = error, {"error": f"{type(error).__name__}: {error}"}
    everybody = [json.loads(blob) for blob in gather(json.dumps(told).encode())]
    failed = [f"rank {k}: {each['error']}" for k, each in enumerate(everybody) if "error" in each]
    if failed:
        raise CheckpointError(f"checkpoint {path} was not written ({'; '.join(failed)})") from cause
    return [result for each in everybody for result in each["result"]]


def _prepare(path: Path, until_named: ExitStack) -> list[Any]:
    folder = until_named.enter_context(writing(path))
    folder.mkdir()
    return [folder.parent.name]


def _write_files(
    folder: Path, rank: int, state: dict[str, Any], shards: Iterable[Shard]
) -> list[Any]:
    """Write this rank's file, on rank 0 also the state; return their entries for the index."""
    from safetensors.numpy import save_file

    if not folder.is_dir():
        raise FileNotFoundError(f"no {folder}: all ranks need the same folder")
    blocks = [block_of(shard) for shard in shards]
    name = f"rank-{rank:04d}.safetensors"
    save_file({place.key: array for place, array in blocks}, folder / name)
    written = [_entry(folder / name, [place for place, _ in blocks])]
    if rank == 0:
        one_file.write(folder / STATE, *flatten(state))
        written.append(_entry(folder / STATE, []))
    return written


def _entry(path: Path, places: list[ShardPlace]) -> dict[str, Any]:
    sync(path)
    return {"file": path.name, "sha256": sha256(path), "blocks": [asdict(each) for each in places]}


def places_of(file: dict[str, Any]) -> list[ShardPlace]:
    """Return the places of the blocks in a file of the index."""
    return [ShardPlace(**{**each, "shape": tuple(each["shape"])}) for each in file["blocks"]]


def _publish(folder: Path, path: Path, files: list[Any]) -> list[Any]:
    """Write the index, and give the folder its name."""
    check(place for file in files for place in places_of(file))
    document = {**FORMAT, "files": files}
    document["sha256"] = digest({}, json.dumps(document))
    (folder / INDEX).write_text(json.dumps(document) + "\n")
    sync(folder / INDEX)
    finish(folder, path)
    return []


def read_index(path: Path) -> list[Any]:
    """Return the entries of a checkpoint's index, or raise ValueError or OSError."""
    document = json.loads((path / INDEX).read_text())
    if document.pop("sha256") != digest({}, json.dumps(document)):
        raise ValueError("its SHA-256 is not that of what it holds")
    found = {name: document[name] for name in FORMAT}
    if found != FORMAT:
        raise ValueError(f"it is {found}, this reads {FORMAT}")
    return list(document["files"])
