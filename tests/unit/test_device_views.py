"""Views of segments on a GPU, and copies: host memory poses as a GPU's.

Where PyTorch's CUDA or CuPy would take a capsule, a stand-in takes its memory as the host's.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pgasdl import Segment, _native, loopback
from pgasdl.device.views import DeviceBytes
from pgasdl.errors import (
    AlignmentError,
    BufferRefusedError,
    PoolFullError,
    SegmentError,
    UnavailableError,
)
from pgasdl.pool import Arena, Pool
from pgasdl.segment import SegmentTable

Patch = pytest.MonkeyPatch


class Capsule(ctypes.Structure):
    """DLManagedTensor, as far as it is read here."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def opened(capsule: object) -> Capsule:
    address = _pointer(capsule, b"dltensor")
    assert address
    return Capsule.from_address(address)


def from_dlpack(raw: Any) -> np.ndarray[Any, Any]:
    """Take host memory that is said to be a GPU's."""
    assert raw.__dlpack_device__() == (2, 3)
    capsule = raw.__dlpack__(stream=1, max_version=(1, 0))
    tensor = opened(capsule)
    assert (tensor.device_type, tensor.device_id, tensor.ndim) == (2, 3, 1)
    assert (tensor.code, tensor.bits, tensor.lanes) == (1, 8, 1)
    memory = (ctypes.c_uint8 * tensor.shape[0]).from_address(tensor.data)
    memory.keep = capsule  # type: ignore[attr-defined]
    return np.frombuffer(memory, np.uint8)


@pytest.fixture(autouse=True)
def cupy(monkeypatch: Patch) -> None:
    """A stand-in for CuPy, whose arrays are NumPy's."""
    module = SimpleNamespace(
        from_dlpack=from_dlpack,
        empty=np.empty,
        cuda=SimpleNamespace(
            Device=type("Device", (contextlib.nullcontext,), {}),
            get_current_stream=lambda ordinal: SimpleNamespace(ptr=70 + ordinal),
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)


@pytest.fixture
def segment(monkeypatch: Patch) -> Iterator[Segment]:
    """A segment of 256 bytes, 0 to 255, that says it is on GPU 3."""
    made: list[Segment] = []
    loopback.run(1, lambda ctx: made.append(ctx.segment(256)))
    made[0].numpy()[:] = range(256)
    monkeypatch.setattr(Segment, "_ordinal", 3)
    yield made[0]
    made.clear()


def test_a_segment_says_where_it_is(segment: Segment, monkeypatch: Patch) -> None:
    assert segment.device == "cuda:3"
    assert segment.__dlpack_device__() == (2, 3)
    assert segment.__cuda_array_interface__ == {
        "version": 3, "typestr": "|u1", "shape": (256,), "strides": None,
        "data": (segment.address, False), "stream": None,
    }  # fmt: skip
    assert "256 bytes on cuda:3" in repr(segment)
    monkeypatch.setattr(Segment, "_ordinal", None)
    assert segment.device == "cpu"
    assert not hasattr(segment, "__cuda_array_interface__")
    assert segment.__dlpack_device__() == (1, 0)


def test_views_of_cupy(segment: Segment) -> None:
    assert (segment.cupy() == np.arange(256)).all()
    view = segment.cupy("float32", 8, (2, 3))
    assert (view.dtype, view.shape) == (np.float32, (2, 3))
    assert view.tobytes() == bytes(range(8, 32))
    assert segment.cupy("bfloat16", 2, 4).dtype == ml_dtypes.bfloat16
    assert segment.cupy("int64", 16).shape == (30,)
    assert segment.cupy(np.float32, 256).shape == (0,)
    view[:] = 0
    assert not segment.cupy(offset=8, shape=24).any()


def test_views_of_peers(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Segment, "_ordinal", 3)

    def program(ctx: Any) -> None:
        segment = ctx.segment(64)
        view = segment.cupy("int32", 8, 2, peer=1 - ctx.rank)
        assert view.ctypes.data == segment.address_of(1 - ctx.rank) + 8
        with pytest.raises(SegmentError, match=r"bytes on rank 0"):
            segment.cupy(offset=65, peer=0)
        ctx.barrier()

    loopback.run(2, program)


def test_views_of_torch(segment: Segment, monkeypatch: Patch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(
        "torch.utils.dlpack.from_dlpack", lambda raw: torch.from_numpy(from_dlpack(raw))
    )
    assert segment.torch().tolist() == list(range(256))
    view = segment.torch(torch.bfloat16, 4, (2, 3))
    assert (view.dtype, tuple(view.shape)) == (torch.bfloat16, (2, 3))
    assert view.data_ptr() == segment.address + 4
    monkeypatch.setattr(Segment, "_ordinal", None)
    assert segment.torch(torch.float32, 256).shape == (0,)  # as any view without elements


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_pool(segment: Segment, monkeypatch: Patch, library: str) -> None:
    """Its arrays are views, and their memory is used again when they are gone."""
    dtype: Any = "float32"
    if library == "torch":
        torch = pytest.importorskip("torch")
        monkeypatch.setattr(
            "torch.utils.dlpack.from_dlpack", lambda raw: torch.from_numpy(from_dlpack(raw))
        )
        dtype = torch.float32
    pool = Pool(SegmentTable(segment.group.core), segment.group)
    pool._parts[3] = [(segment, Arena(segment.nbytes))]
    first, second = pool.empty((2, 3), dtype, 3), pool.empty(40, dtype, 3)
    assert np.asarray(first).tobytes() == bytes(range(24))
    assert np.asarray(second).ctypes.data == segment.address + 64
    assert pool.describe().startswith("pool of 256 bytes on cuda:3 in 1 segments: 0 are free")
    with pytest.raises(PoolFullError, match=r"on cuda:3 .* ctx\.pool\(64, device=\"cuda:3\"\)"):
        pool.empty(1, dtype, 3)
    with pytest.raises(PoolFullError, match=r"no pool: call ctx\.pool\(nbytes\)"):
        pool.empty(1, dtype, None)
    del first
    gc.collect()
    assert np.asarray(pool.empty(16, dtype, 3)).ctypes.data == segment.address
    assert pool.empty((0, 2), "float32", 3).shape == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("float32", 2, 1), AlignmentError, "byte 2 is no multiple of 4"),
        (("float32", 0, 65), SegmentError, "leaves segment"),
        (("uint8", -1, 1), SegmentError, "leaves segment"),
        (("uint8", 257, 0), SegmentError, "leaves segment"),
    ],
)
def test_views_that_cannot_be(
    segment: Segment, arguments: tuple[Any, ...], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        segment.cupy(*arguments)


def test_the_host_does_not_view_a_gpu(segment: Segment, monkeypatch: Patch) -> None:
    with pytest.raises(UnavailableError, match=r"on cuda:3, .* cupy\(\) or torch\(\)"):
        segment.numpy()
    monkeypatch.setattr(Segment, "_ordinal", None)
    with pytest.raises(UnavailableError, match=r"on the host: view it by numpy\(\)"):
        segment.cupy()


def test_capsules_keep_the_memory(segment: Segment) -> None:
    references = sys.getrefcount(segment)
    capsule = segment.__dlpack__()
    assert sys.getrefcount(segment) > references
    del capsule
    assert sys.getrefcount(segment) == references


def test_capsules_are_not_copied(segment: Segment) -> None:
    assert opened(segment.__dlpack__(dl_device=(2, 3), copy=False)).data == segment.address
    for options in ({"copy": True}, {"dl_device": (1, 0)}):
        with pytest.raises(BufferError):
            segment.__dlpack__(**options)


def test_no_bytes_have_no_address() -> None:
    interface = DeviceBytes(None, 0x1000, 0, 0).__cuda_array_interface__
    assert (interface["shape"], interface["data"]) == ((0,), (0, False))


@pytest.mark.parametrize("on_device", [True, False])
def test_copies(segment: Segment, monkeypatch: Patch, on_device: bool) -> None:
    places = []

    def copy(to: int, source: int, nbytes: int, device: int, stream: int) -> None:
        places.append((device, stream))
        ctypes.memmove(to, source, nbytes)

    monkeypatch.setattr(_native, "device_copy", copy)
    monkeypatch.setattr(_native, "refuse_capture", lambda *_: None)
    if not on_device:
        monkeypatch.setattr(Segment, "_ordinal", None)
    given = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)
    given.flags.writeable = False
    segment.copy_from(given, 10)
    there = np.zeros((2, 3), np.float32)
    segment.copy_to(there, 10)
    assert (there == given).all()
    edge = bytearray(10)
    segment.copy_to(edge)
    assert edge == bytes(range(10))
    segment.copy_from(b"", 256)
    segment.copy_from(memoryview(b"xy"), 254)
    assert set(places) == ({(3, 73)} if on_device else set())
    with pytest.raises(SegmentError, match="leaves segment"):
        segment.copy_from(given, 233)
    with pytest.raises(SegmentError, match="leaves segment"):
        segment.copy_to(there, -1)
    with pytest.raises(BufferRefusedError, match="read-only"):
        segment.copy_to(given)
    with pytest.raises(BufferRefusedError, match="not contiguous"):
        segment.copy_from(given.T)
