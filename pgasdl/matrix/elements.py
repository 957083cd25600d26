"""Elements of matrices: which dtypes there are, and in which they are computed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pgasdl.buffers import DTYPES
from pgasdl.errors import BufferRefusedError

Array = npt.NDArray[Any]
Function = TypeVar("Function", bound=Callable[..., Any])
_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {np.dtype(bool): "bytes"}
# Arithmetic of these is done in float32; they only store.
STORED = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def core_dtype(dtype: np.dtype[Any]) -> str:
    """Return the core's name of a matrix's dtype.

    Raises
    ------
    BufferRefusedError
        Matrices do not have it.
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise BufferRefusedError(f"matrices are of {', '.join(DTYPES)} or bool, not of {dtype}")
    return name


def computed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which elements of this one are computed."""
    return np.dtype(np.float32) if dtype in STORED else dtype


def as_computed(array: Array, result: np.dtype[Any] | None = None) -> Array:
    """Return elements as they are computed: a copy that is as wide, or the array itself."""
    wide = np.float64 if result == np.float64 and array.dtype in STORED else computed(array.dtype)
    return array.astype(wide, copy=False)


# NumPy's names of errors, and of its settings for them.
_ERRORS = {
    "divide by zero": "divide",
    "overflow": "over",
    "underflow": "under",
    "invalid value": "invalid",
}


def late(function: Function) -> Function:
    """Let errors of floating point numbers wait until this rank has done its share for others."""

    @wraps(function)
    def call(*inputs: Any, **options: Any) -> Any:
        found: dict[str, int] = {}
        with np.errstate(all="call", call=found.__setitem__):
            result = function(*inputs, **options)
        settings: Any = np.geterr() if found else None
        for kind, flag in found.items():
            wanted, text = settings[_ERRORS[kind]], f"{kind} encountered in blocks of this rank"
            if wanted == "raise":
                raise FloatingPointError(text)
            if wanted == "warn":
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            if wanted == "call":  # of an operation that this one is a part of, too
                np.geterrcall()(kind, flag)  # type: ignore[misc, operator]
        return result

    return call  # type: ignore[return-value]
