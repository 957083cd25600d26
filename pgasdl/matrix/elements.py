"""Elements of matrices: which dtypes there are, and in which they are computed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pgasdl.buffers import DTYPES
from pgasdl.errors import BufferRefusedError

Array = npt.NDArray[Any]
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
