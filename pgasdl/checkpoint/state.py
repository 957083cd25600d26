"""A state, flat: arrays and tensors by their place ("optimizer.state.0.exp_avg"), the rest as JSON.

Arrays become tensors, and tensors arrays, where a form stores only one of the two kinds.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Leaves = dict[str, Any]  # arrays and tensors

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# The dtypes that safetensors has in NumPy, by name.
_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64"
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in _NAMES.split()}
DTYPES["bfloat16"] = _BFLOAT16
TEXTS = ("pgasdl.rest", "pgasdl.sha256")  # tensors of format "dcp", beside the state's
RESERVED = (*TEXTS, "__metadata__")  # the last by safetensors


def flatten(state: dict[str, Any]) -> tuple[Leaves, str]:
    """Return the arrays and tensors of a state by place, and all the rest as JSON.

    TypeError: JSON cannot hold a value, or ``DTYPES`` lacks an array's dtype. ValueError: two
    leaves have one place, as in ``{"a.b": x, "a": {"b": y}}``, or a format has its own there.
    """
    leaves: Leaves = {}
    tree = _flatten(state, "", leaves)
    arrays = [name for name, leaf in leaves.items() if not _is_tensor(leaf)]
    return leaves, json.dumps({"arrays": arrays, "state": tree})


def unflatten(leaves: Leaves, rest: str) -> dict[str, Any]:
    """Return the state that was flattened."""
    return dict(_unflatten(json.loads(rest)["state"], leaves))


def arrays_of(rest: str) -> set[str]:
    """Return the places of arrays; the other leaves are tensors."""
    return set(json.loads(rest)["arrays"])


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # without PyTorch there are no tensors
    return torch is not None and isinstance(value, torch.Tensor)


def _flatten(value: Any, place: str, leaves: Leaves) -> Any:
    if isinstance(value, np.ndarray) or _is_tensor(value):
        if place in leaves or place in RESERVED:
            raise ValueError(f"two values, of the state or of a format, have the place {place!r}")
        if _is_tensor(value):  # tied ones are stored twice
            leaves[place] = value.detach().cpu().contiguous().clone()
        else:
            leaves[place] = packed(value, place)
        return {"stored": place}
    if isinstance(value, dict):  # JSON's keys are strings, an optimizer's are numbers
        for key in value:
            if not isinstance(key, str | int | float | None):
                raise TypeError(f"{place or 'the state'}: key {key!r}: JSON holds str and numbers")
        return {
            "items": [
                [key, _flatten(each, f"{place}.{key}".lstrip("."), leaves)]
                for key, each in value.items()
            ]
        }
    if isinstance(value, list | tuple):
        return [_flatten(each, f"{place}.{at}", leaves) for at, each in enumerate(value)]
    if not isinstance(value, str | int | float | None):
        raise TypeError(f"{place or 'the state'}: JSON cannot hold a {type(value).__name__}")
    return value


def _unflatten(value: Any, leaves: Leaves) -> Any:
    if isinstance(value, list):
        return [_unflatten(each, leaves) for each in value]
    if isinstance(value, dict) and "stored" in value:
        return leaves[value["stored"]]
    if isinstance(value, dict):
        return {key: _unflatten(each, leaves) for key, each in value["items"]}
    return value


# --- leaves


def packed(array: Array, name: str) -> Array:
    """Return an array in C order and native byte order, or raise TypeError for its dtype."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name}: a masked array: store its data and its mask")
    if array.dtype.name not in DTYPES:
        raise TypeError(f"{name}: an array of dtype {array.dtype}; there are {', '.join(DTYPES)}")
    return np.asarray(array, DTYPES[array.dtype.name], order="C")


def tensor_of(leaf: Any) -> Any:
    """Return a copy of an array as a tensor, or a tensor. Needs PyTorch."""
    import torch

    if leaf.dtype == _BFLOAT16:
        return torch.from_numpy(leaf.view(np.int16).copy()).view(torch.bfloat16)
    return leaf if _is_tensor(leaf) else torch.from_numpy(leaf.copy())


def array_of(tensor: Any) -> Array:
    """Return the memory of a tensor as an array. Needs PyTorch."""
    import torch

    half = tensor.dtype == torch.bfloat16
    array: Array = (tensor.view(torch.int16) if half else tensor).numpy()
    return array.view(_BFLOAT16) if half else array


def digest(leaves: Leaves, rest: str) -> str:
    """Return the SHA-256 of all that a state holds."""
    sha = hashlib.sha256(rest.encode())
    for name, leaf in sorted(leaves.items()):
        sha.update(f"{name} {leaf.dtype} {list(leaf.shape)}".encode())
        flat = leaf.reshape(-1)
        if _is_tensor(leaf):
            import torch

            flat = flat.view(torch.uint8).numpy()
        sha.update(flat.view(np.uint8).data)
    return sha.hexdigest()
