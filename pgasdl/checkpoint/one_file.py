"""Format "safetensors": one file without any pickle."""

from __future__ import annotations

from pathlib import Path

from pgasdl.checkpoint.files import require
from pgasdl.checkpoint.state import Leaves, arrays_of, digest, tensor_of

PACKAGE = "safetensors"


def write(path: Path, leaves: Leaves, rest: str) -> None:
    """Write a file; if there are tensors, arrays are written as tensors, too."""
    from safetensors import SafetensorError

    metadata = {"rest": rest, "sha256": digest(leaves, rest)}
    try:
        if leaves.keys() <= arrays_of(rest):
            from safetensors.numpy import save_file

            save_file(leaves, path, metadata)
            return
        from safetensors.torch import save_file as save_tensors

        tensors = {name: tensor_of(leaf) for name, leaf in leaves.items()}
        save_tensors(tensors, path, {"format": "pt", **metadata})
    except KeyError as error:
        name = next(name for name, leaf in leaves.items() if leaf.dtype in error.args)
        raise TypeError(f"{name}: safetensors holds no {error}") from error
    except SafetensorError as error:
        if "header too large" in str(error):
            raise ValueError("numbers and texts take over 100 MB: keep them in arrays") from error
        raise OSError(f"{path}: {error}") from error


def read(path: Path) -> tuple[Leaves, str, str]:
    """Return the content of a file: arrays and tensors, the rest, and the SHA-256 of both."""
    from safetensors import safe_open

    path.open("rb").close()  # to safetensors all that it cannot open is a missing file
    with safe_open(path, framework="np") as file:
        metadata, names = file.metadata() or {}, set(file.keys())
        if not {"rest", "sha256"} <= metadata.keys():
            raise ValueError("Checkpoints.save did not write it")
        arrays = arrays_of(metadata["rest"]) & names
        leaves: Leaves = {name: file.get_tensor(name) for name in arrays}
    if names > arrays:
        require("torch", f"{path}, which holds tensors,")
        with safe_open(path, framework="pt") as file:
            leaves |= {name: file.get_tensor(name) for name in names - arrays}
    return leaves, metadata["rest"], metadata["sha256"]
