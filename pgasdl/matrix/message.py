"""Messages of a master to its workers: values as JSON, and after it the bytes of arrays.

Nothing in them is code: a function is named, and only NumPy's are.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pgasdl.buffers import as_numpy_dtype
from pgasdl.checkpoint import Checkpoints, Sharded
from pgasdl.matrix.elements import Array
from pgasdl.matrix.layout import Block, Layout

_HEAD = struct.Struct("<Q")  # bytes of the JSON


def encode(value: Any, name: Callable[[Any], list[Any] | None]) -> bytes:
    """Return a message of a value; TypeError: it cannot be sent.

    Numbers, text, arrays, dtypes, slices, layouts, checkpoints and NumPy's functions can, also in
    lists, tuples and dictionaries. ``name`` names what the receiver has, by what JSON holds.
    """
    arrays: list[Array] = []
    text = json.dumps(_pack(value, name, arrays)).encode()
    return b"".join([_HEAD.pack(len(text)), text, *(array.tobytes() for array in arrays)])


def decode(message: bytes, find: Callable[[list[Any]], Any]) -> Any:
    """Return the value of a message; ``find`` returns what is named. Arrays are read-only."""
    (length,) = _HEAD.unpack_from(message)
    begin = _HEAD.size + length
    return _Reader(message, begin, find).unpack(json.loads(message[_HEAD.size : begin]))


def _is_dtype(value: Any) -> bool:
    """Whether it is one, or stands for one: NumPy's, Python's or PyTorch's."""
    if isinstance(value, type):
        return issubclass(value, np.generic) or value in (bool, int, float)
    return isinstance(value, np.dtype) or type(value).__name__ == "dtype"


def _travels(dtype: np.dtype[Any]) -> bool:
    """Whether the receiver makes the same of its name."""
    try:
        return not dtype.hasobject and as_numpy_dtype(dtype.name) == dtype
    except (TypeError, ValueError):
        return False


def _path(function: Any) -> str:
    if isinstance(function, np.ufunc):
        return f"numpy.{function.__name__}"
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"


def _function(path: str) -> Any:
    """Return a public function of NumPy; None: there is none."""
    first, *parts = path.split(".")
    found: Any = np if first == "numpy" else None
    for part in parts:
        found = None if part.startswith("_") else getattr(found, part, None)
    return found if callable(found) and not isinstance(found, type) else None


class _Kind(NamedTuple):
    """A row of the table: which values, what they are made of, and how."""

    has: Callable[[Any], bool]
    parts: Callable[[Any], Any]
    whole: Callable[[Any], Any]


def _of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _layout(parts: list[Any]) -> Layout:
    m, n, blocks, name = parts
    return Layout((m, n), (Block(*each) for each in blocks), name)


_KINDS = {
    "tuple": _Kind(_of(tuple), list, tuple),
    "dict": _Kind(_of(dict), lambda value: [[*item] for item in value.items()], dict),
    "slice": _Kind(
        _of(slice), lambda value: [value.start, value.stop, value.step], lambda p: slice(*p)
    ),
    "ellipsis": _Kind(_of(type(...)), lambda _: None, lambda _: ...),
    "number": _Kind(_of(np.generic), np.asarray, lambda array: array[()]),
    "layout": _Kind(
        _of(Layout),
        lambda value: [*value.shape, [[b.rank, *b.extent] for b in value.blocks], value.name],
        _layout,
    ),
    "checkpoints": _Kind(
        _of(Checkpoints),
        lambda value: [str(value.folder), value.format],
        lambda parts: Checkpoints(*parts),
    ),
    "sharded": _Kind(_of(Sharded), lambda value: str(value.path), lambda path: Sharded(Path(path))),
    "dtype": _Kind(_is_dtype, lambda value: as_numpy_dtype(value).name, as_numpy_dtype),
    "function": _Kind(lambda value: _function(_path(value)) is value, _path, _function),
}


def _pack(value: Any, name: Callable[[Any], list[Any] | None], arrays: list[Array]) -> Any:
    """Return what JSON holds of a value; arrays go into a list."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if (known := name(value)) is not None:
        return {"known": known}
    if isinstance(value, list):
        return [_pack(each, name, arrays) for each in value]
    if isinstance(value, np.ndarray) and value.dtype.byteorder == ">":
        value = value.astype(value.dtype.newbyteorder("="))
    if isinstance(value, np.ndarray) and _travels(value.dtype):
        arrays.append(value)
        return {"array": [value.dtype.name, value.shape]}
    for kind, row in _KINDS.items():
        if row.has(value):
            return {kind: _pack(row.parts(value), name, arrays)}
    raise TypeError(
        f"workers cannot get {value!r}: only values, matrices and NumPy's functions are sent"
    )


class _Reader:
    """Takes arrays out of a message, one after another."""

    def __init__(self, message: bytes, begin: int, find: Callable[[list[Any]], Any]) -> None:
        self._message, self._at, self._find = message, begin, find

    def unpack(self, packed: Any) -> Any:
        """Return what was packed."""
        if isinstance(packed, list):
            return [*map(self.unpack, packed)]
        if not isinstance(packed, dict):
            return packed
        ((kind, what),) = packed.items()
        if kind == "known":
            return self._find(what)
        return self._array(*what) if kind == "array" else _KINDS[kind].whole(self.unpack(what))

    def _array(self, name: str, shape: list[int]) -> Array:
        found: Array = np.ndarray(shape, as_numpy_dtype(name), self._message, self._at)
        self._at += found.nbytes
        return found
