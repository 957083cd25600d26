"""Segments of contract tests on a GPU, which the tests' programs do not know.

Their memory is that of the fake driver. A program's accesses to ``segment.numpy()`` pass through
the fake driver's own window, as if each were a copy to or from the device that takes no time; what
pgasdl does there goes through streams, and an address of it that the host touches ends the process.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from pgasdl import Context, Segment
from pgasdl.buffers import as_numpy_dtype

_on_host = Segment.numpy
_make = Context.segment


def _window(
    segment: Segment,
    dtype: npt.DTypeLike = np.uint8,
    offset: int = 0,
    shape: int | tuple[int, ...] | None = None,
    *,
    peer: int | None = None,
) -> Any:
    if segment.device == "cpu":
        return _on_host(segment, dtype, offset, shape, peer=peer)
    element = as_numpy_dtype(dtype)
    _, shape = segment._on_device(element, element.itemsize, offset, shape, peer)
    needed = math.prod(shape) * element.itemsize
    if needed == 0:
        return np.empty(shape, element)
    driver = ctypes.CDLL("libcuda.so.1")
    driver.fakeHostAddress.restype = ctypes.c_void_p
    there = segment.address if peer is None else segment.address_of(peer)
    address = driver.fakeHostAddress(ctypes.c_uint64(there + offset))
    window = (ctypes.c_uint8 * needed).from_address(address)
    window.keep = segment  # type: ignore[attr-defined]
    return np.ctypeslib.as_array(window).view(element).reshape(shape)


def _segment(context: Context, nbytes: int, **options: Any) -> Segment:
    return _make(context, nbytes, **({"device": "cuda:0"} | options))


@contextmanager
def segments_on_gpu() -> Iterator[None]:
    """While it lasts, ``ctx.segment`` makes segments on the first GPU."""
    with (
        mock.patch.object(Context, "segment", _segment),
        mock.patch.object(Segment, "numpy", _window),
    ):
        yield
