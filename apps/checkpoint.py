"""Checkpoints: a folder of them, each written whole or not at all, and checked when it is read.

A state is what ``state_dict()`` methods return, in dictionaries and lists. Its tensors are stored
flat, by their place ("optimizer.state.0.exp_avg"), all the rest as JSON. One rank writes; every
rank reads, also on another number of ranks. Formats: "safetensors", one file without any pickle,
and "dcp", a folder of ``torch.distributed.checkpoint``, which other programs read by that.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

Tensors = dict[str, Tensor]
FORMATS = ("safetensors", "dcp")

warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as is meant


class CheckpointError(Exception):
    """A checkpoint is damaged, or cannot be read."""


class Checkpoints:
    """A folder of checkpoints, named by iteration; the last complete one counts."""

    def __init__(self, folder: str | Path, format: str = "safetensors") -> None:
        self.folder, self.format = Path(folder), format

    def path(self, iteration: int) -> Path:
        """Where the checkpoint of an iteration is."""
        return self.folder / f"{iteration:08d}.{self.format}"

    def save(self, iteration: int, state: dict[str, Any]) -> None:
        """Write a checkpoint. It has its name only once it is complete on the disk."""
        tensors: Tensors = {}
        rest = json.dumps(_flatten(state, "", tensors))
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(iteration)
        partial = path.with_suffix(".partial")
        _remove(partial)
        if self.format == "dcp":
            _write_dcp(partial, tensors, rest)
        else:
            _write_safetensors(partial, tensors, rest)
        if path.is_dir():  # only an empty folder can be replaced
            _remove(path)
        partial.replace(path)
        _sync(self.folder)

    def load_last(self) -> dict[str, Any] | None:
        """Read the last checkpoint that is complete; None if there is none at all."""
        paths = sorted(self.folder.glob(f"*.{self.format}"), reverse=True)
        for path in paths:
            try:
                return load(path)
            except CheckpointError as error:
                print(f"{error}; going back to the one before it", file=sys.stderr, flush=True)
        if paths:
            raise CheckpointError(f"every checkpoint in {self.folder} is damaged")
        return None


def load(path: Path) -> dict[str, Any]:
    """Read one checkpoint, or raise CheckpointError."""
    try:
        tensors, rest, digest = _read_dcp(path) if path.is_dir() else _read_safetensors(path)
        if digest != _digest(tensors, rest):
            raise ValueError("its SHA-256 is not that of what it holds")
        state: dict[str, Any] = _unflatten(json.loads(rest), tensors)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"checkpoint {path} is damaged or unreadable ({reason})") from error
    return state


# --- a state, flat


def _flatten(value: Any, place: str, tensors: Tensors) -> Any:
    """Put the tensors of a state into ``tensors``; return all the rest, for JSON."""
    if isinstance(value, Tensor):
        tensors[place] = value.detach().cpu().contiguous().clone()  # tied ones are stored twice
        return {"tensor": place}
    if isinstance(value, dict):  # JSON's keys are strings, an optimizer's are numbers
        return {
            "items": [
                [key, _flatten(each, f"{place}.{key}".lstrip("."), tensors)]
                for key, each in value.items()
            ]
        }
    if isinstance(value, list | tuple):
        return [_flatten(each, f"{place}.{at}", tensors) for at, each in enumerate(value)]
    return value


def _unflatten(value: Any, tensors: Tensors) -> Any:
    if isinstance(value, list):
        return [_unflatten(each, tensors) for each in value]
    if isinstance(value, dict) and "tensor" in value:
        return tensors[value["tensor"]]
    if isinstance(value, dict):
        return {key: _unflatten(each, tensors) for key, each in value["items"]}
    return value


def _digest(tensors: Tensors, rest: str) -> str:
    sha = hashlib.sha256(rest.encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


# --- safetensors: one file


def _write_safetensors(path: Path, tensors: Tensors, rest: str) -> None:
    metadata = {"format": "pt", "rest": rest, "sha256": _digest(tensors, rest)}
    safetensors.torch.save_file(tensors, path, metadata)
    _sync(path)


def _read_safetensors(path: Path) -> tuple[Tensors, str, str]:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    return tensors, metadata["rest"], metadata["sha256"]


# --- torch.distributed.checkpoint: a folder, written by one process and read by each
# It is imported where it is used: that takes a second.


def _write_dcp(path: Path, tensors: Tensors, rest: str) -> None:
    from torch.distributed import checkpoint as dcp

    texts = {"rest": _tensor_of(rest), "sha256": _tensor_of(_digest(tensors, rest))}
    dcp.save({**tensors, **texts}, checkpoint_id=path, no_dist=True)
    _sync(path)


def _read_dcp(path: Path) -> tuple[Tensors, str, str]:
    from torch.distributed import checkpoint as dcp

    reader = dcp.FileSystemReader(path)
    tensors = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in reader.read_metadata().state_dict_metadata.items()
    }
    try:
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    except dcp.api.CheckpointException as error:  # not an Exception to Python
        raise ValueError(str(error)) from error
    rest, digest = (bytes(tensors.pop(name).tolist()).decode() for name in ("rest", "sha256"))
    return tensors, rest, digest


def _tensor_of(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


# --- files


def _sync(path: Path) -> None:
    """Let a file, or the names in a folder, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
