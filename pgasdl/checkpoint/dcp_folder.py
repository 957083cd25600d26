"""Format "dcp": a folder of ``torch.distributed.checkpoint``, which other programs read by that.

One process writes it, and each reads it. PyTorch's module takes a second to import. Its
``.metadata`` is a pickle; while it is read, only classes that describe tensors are called.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pgasdl.checkpoint.state import TEXTS, Leaves, array_of, arrays_of, digest, tensor_of

PACKAGE = "torch"
# Beside dtypes, and the classes of PyTorch's module of descriptions.
_KNOWN = (
    "torch.Size",
    "torch.serialization._get_layout",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
)


def write(path: Path, leaves: Leaves, rest: str) -> None:
    """Write a folder."""
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors = {name: tensor_of(leaf) for name, leaf in leaves.items()}
    for name, text in zip(TEXTS, (rest, digest(leaves, rest)), strict=True):
        tensors[name] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    try:
        with _alone():
            save(tensors, checkpoint_id=path, no_dist=True)
    except RuntimeError as error:
        raise OSError(f"{path}: {error}") from error


def read(path: Path) -> tuple[Leaves, str, str]:
    """Return the content of a folder: arrays and tensors, the rest, and the SHA-256 of both."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with (path / ".metadata").open("rb") as file:
                try:
                    metadata = _Descriptions(file).load()
                except MemoryError as error:  # of a few KiB: they are damaged
                    raise ValueError("its descriptions cannot be read") from error
            metadata.storage_meta = StorageMeta(load_id=self.load_id)
            return metadata

    reader = Reader(path)
    metadata: Any = reader.read_metadata()
    described = metadata.state_dict_metadata
    nbytes = sum(each.size.numel() * each.properties.dtype.itemsize for each in described.values())
    if nbytes > sum(each.stat().st_size for each in path.iterdir()):
        raise ValueError("it describes more than it holds")
    leaves: Leaves = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in described.items()
    }
    with _alone():
        load(leaves, storage_reader=reader, no_dist=True)
    rest, stored = (bytes(leaves.pop(name).tolist()).decode() for name in TEXTS)
    return leaves | {name: array_of(leaves[name]) for name in arrays_of(rest)}, rest, stored


class _Descriptions(pickle.Unpickler):
    """Reads descriptions of tensors, and refuses all other names, which could run any code."""

    def find_class(self, module: str, name: str) -> Any:
        import torch
        from torch.distributed.checkpoint import metadata

        if f"{module}.{name}" in _KNOWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == metadata.__name__:
            found = getattr(metadata, name, None)
            # BytesStorageMetadata is refused: PyTorch unpickles the bytes that it names.
            allowed = isinstance(found, type) and found is not metadata.BytesStorageMetadata
            if allowed and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} does not describe a tensor")


@contextmanager
def _alone() -> Iterator[None]:
    """Silence PyTorch's warning that no other process takes part; raise what an error is about."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except CheckpointException as error:  # not an Exception to Python
            raise error.failures[0][0] from error
