"""Devices, streams and memory on a GPU are understood; needs neither a GPU nor CuPy."""

from __future__ import annotations

import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pgasdl import _native
from pgasdl.buffers import memory_of, require_host
from pgasdl.device import names, streams
from pgasdl.errors import BufferRefusedError, ConfigError, UnavailableError

Patch = pytest.MonkeyPatch


class FakeTorch:
    """The part of PyTorch that is asked for, on a machine where it uses ``current`` of its GPUs."""

    class Tensor:
        def __init__(self, device: str, contiguous: bool = True) -> None:
            kind, _, index = device.partition(":")
            self.device = SimpleNamespace(type=kind, index=int(index or 0))
            self._contiguous = contiguous
            self.dtype, self.shape = FakeTorch.dtype("bfloat16"), (2, 3)

        def is_contiguous(self) -> bool:
            return self._contiguous

        def stride(self) -> tuple[int, ...]:
            return (1, 2)

        def numel(self) -> int:
            return 6

        def element_size(self) -> int:
            return 2

        def data_ptr(self) -> int:
            return 0x7000

    class dtype(str):
        __slots__ = ()

    class device(str):
        __slots__ = ()

    def __init__(self, current: int | None) -> None:
        self.cuda = SimpleNamespace(
            is_initialized=lambda: current is not None,
            current_device=lambda: current,
            current_stream=lambda ordinal: SimpleNamespace(cuda_stream=100 + ordinal),
        )


class FakeCupy:
    """The part of CuPy that is asked for."""

    class Device:
        def __init__(self, number: int) -> None:
            self.id = number

    def __init__(self, current: int) -> None:
        self.cuda = SimpleNamespace(
            Device=self.Device,
            runtime=SimpleNamespace(getDevice=lambda: current),
            get_current_stream=lambda ordinal: SimpleNamespace(ptr=200 + ordinal),
        )


@pytest.fixture
def libraries(monkeypatch: Patch) -> Callable[..., None]:
    """Put stand-ins in the place of PyTorch and CuPy; None: it is not loaded."""

    def put(torch: FakeTorch | None = None, cupy: FakeCupy | None = None) -> None:
        for name, module in (("torch", torch), ("cupy", cupy)):
            if module is None:
                monkeypatch.delitem(sys.modules, name, raising=False)
            else:
                monkeypatch.setitem(sys.modules, name, module)

    put()
    return put


@pytest.fixture
def gpus(monkeypatch: Patch) -> None:
    """Four GPUs, of which the driver says nothing but the names."""
    monkeypatch.setattr(_native, "cuda_device_count", lambda: 4)
    infos = [SimpleNamespace(ordinal=i, name=f"H{i}") for i in range(4)]
    monkeypatch.setattr(_native, "cuda_devices", lambda: infos)
    monkeypatch.setattr(_native, "cuda_device_of", lambda address: address >> 16)


# --- devices


@pytest.mark.usefixtures("gpus", "libraries")
@pytest.mark.parametrize(
    ("device", "ordinal"),
    [("cpu", None), ("cpu:0", None), ("cuda", 0), ("cuda:0", 0), ("cuda:3", 3)],
)
def test_names_of_devices(device: str, ordinal: int | None) -> None:
    assert names.ordinal_of(device) == ordinal
    assert names.name_of(ordinal) == {None: "cpu"}.get(ordinal, f"cuda:{ordinal}")


@pytest.mark.usefixtures("gpus")
def test_devices_of_libraries(libraries: Callable[..., None]) -> None:
    libraries(FakeTorch(None), FakeCupy(2))
    assert names.ordinal_of(FakeTorch.device("cuda:1")) == 1
    assert names.ordinal_of(FakeTorch.device("cpu")) is None
    assert names.ordinal_of(FakeCupy.Device(3)) == 3
    with pytest.raises(ConfigError, match="device mps is refused"):
        names.ordinal_of(FakeTorch.device("mps"))


@pytest.mark.usefixtures("gpus")
def test_the_current_device(libraries: Callable[..., None]) -> None:
    libraries(FakeTorch(1), FakeCupy(2))
    assert names.ordinal_of("cuda") == 1
    libraries(FakeTorch(None), FakeCupy(2))  # PyTorch is loaded, and does not use CUDA
    assert names.ordinal_of("cuda") == 2
    libraries(FakeTorch(None))
    assert names.ordinal_of("cuda") == 0


@pytest.mark.usefixtures("gpus", "libraries")
@pytest.mark.parametrize("device", ["gpu", "CUDA:0", "cuda:", "cuda:-1", "cuda:1 ", "", None, 1.0])
def test_what_names_no_device(device: object) -> None:
    with pytest.raises(ConfigError, match='"cpu", "cuda", or such as "cuda:1"'):
        names.ordinal_of(device)


@pytest.mark.usefixtures("gpus", "libraries")
def test_integers_are_no_devices() -> None:
    with pytest.raises(ConfigError, match=r'device 3 is refused.*"cuda:3" is a GPU'):
        names.ordinal_of(3)


@pytest.mark.usefixtures("gpus", "libraries")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(UnavailableError, match=r"cuda:4: this process sees cuda:0 \(H0\), cuda:1"):
        names.ordinal_of("cuda:4")


def test_no_device_at_all(monkeypatch: Patch) -> None:
    monkeypatch.setattr(_native, "cuda_device_count", lambda: 0)
    monkeypatch.setattr(_native, "cuda_missing", lambda: "no driver")
    assert names.ordinal_of("cpu") is None
    with pytest.raises(UnavailableError, match="device cuda: no driver"):
        names.ordinal_of("cuda")


# --- streams


class Protocol:
    def __init__(self, *answer: object) -> None:
        self._answer = answer

    def __cuda_stream__(self) -> tuple[object, ...]:
        return self._answer


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0), (7, 7), (2**64 - 1, 2**64 - 1), (Protocol(0, 8), 8),
        (SimpleNamespace(cuda_stream=9), 9), (SimpleNamespace(ptr=10), 10), (None, 0),
    ],
)  # fmt: skip
def test_streams(stream: object, handle: int) -> None:
    assert streams.stream_handle(stream, 0) == handle


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    "stream", [True, -1, 2**64, "0", 1.0, SimpleNamespace(ptr="x"), Protocol(0, None)]
)
def test_what_is_no_stream(stream: object) -> None:
    with pytest.raises(ConfigError, match="is refused: pass a stream of PyTorch or CuPy"):
        streams.stream_handle(stream, 0)


def test_a_stream_of_a_later_protocol() -> None:
    with pytest.raises(ConfigError, match="version 1 of __cuda_stream__"):
        streams.stream_handle(Protocol(1, 8), 0)


def test_the_current_stream(libraries: Callable[..., None]) -> None:
    libraries(FakeTorch(0), FakeCupy(0))
    assert streams.stream_handle(None, 2) == 102
    libraries(FakeTorch(None), FakeCupy(0))
    assert streams.stream_handle(None, 2) == 202


# --- memory


def array(**changes: object) -> Any:
    """An object with ``__cuda_array_interface__``: 2 x 3 float32 at 0x2_0040 of GPU 2."""
    interface = {
        "version": 3, "shape": (2, 3), "typestr": "<f4", "data": (0x20040, False),
        "strides": None, "stream": 1,
    }  # fmt: skip
    return SimpleNamespace(__cuda_array_interface__=interface | changes)


@pytest.mark.usefixtures("gpus")
def test_an_array_on_a_gpu() -> None:
    given = array()
    memory = memory_of(given, device=True)
    assert (memory.address, memory.nbytes, memory.device) == (0x20040, 24, 2)
    assert (memory.dtype, memory.shape, memory.count) == (np.float32, (2, 3), 6)
    assert memory.owner is given
    assert memory_of(array(strides=(12, 4)), device=True).shape == (2, 3)
    assert memory_of(array(shape=(1, 6), strides=(999, 4)), device=True).nbytes == 24
    assert memory_of(array(data=(0x20040, True)), writable=False, device=True).device == 2


@pytest.mark.usefixtures("gpus", "libraries")
def test_an_empty_array_on_a_gpu() -> None:
    memory = memory_of(array(shape=(0, 3), data=(0, False)), device=True)
    assert (memory.address, memory.nbytes, memory.device) == (0, 0, 0)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strides": (4, 8)}, r"shape \(2, 3\) on cuda:2 is not contiguous"),
        ({"data": (0x20040, True)}, "read-only"),
        ({"mask": object()}, "mask"),
        ({"data": None}, "not understood"),
        ({"typestr": "?what"}, "not understood"),
        ({"shape": "ab"}, "not understood"),
    ],
)
def test_arrays_that_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(BufferRefusedError, match=words):
        memory_of(array(**changes), device=True)


@pytest.mark.usefixtures("gpus")
def test_bfloat16_of_cupy() -> None:
    given = array(typestr="|V2")
    assert memory_of(given, device=True).dtype == np.dtype("V2")
    given.dtype = np.dtype(ml_dtypes.bfloat16)
    assert memory_of(given, device=True).native_dtype == "bfloat16"


class Exporter:
    """Has DLPack alone; its memory is a host array's, whatever it says."""

    def __init__(self, nbytes: int, device: tuple[int, int] = (2, 1)) -> None:
        self.memory = np.zeros(nbytes, np.uint8)
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **_: object) -> object:
        data = self.memory.ctypes.data
        return _native.device_capsule(self.memory, data, self.memory.nbytes, self.device[1])


def test_an_array_by_dlpack_alone() -> None:
    given = Exporter(48)
    memory = memory_of(given, device=True)
    assert (memory.address, memory.nbytes) == (given.memory.ctypes.data, 48)
    assert (memory.dtype, memory.shape, memory.device) == (np.uint8, (48,), 1)
    owner = weakref.ref(given.memory)
    del given
    assert owner() is not None
    del memory
    assert owner() is None


def test_memory_that_is_nowhere() -> None:
    with pytest.raises(BufferRefusedError, match="Exporter offers no memory"):
        memory_of(Exporter(8, device=(10, 0)), device=True)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("given", [array(), Exporter(8), Exporter(8, device=(13, 0))])
def test_host_memory_is_asked_for_unless_said_otherwise(given: object) -> None:
    for ask in (memory_of, require_host):
        with pytest.raises(BufferRefusedError, match="on a GPU: only host memory works here"):
            ask(given)


def test_host_memory_stays_host_memory() -> None:
    given = np.zeros(3)
    for buffer in (given, bytearray(24), given.data):
        require_host(buffer)
        assert memory_of(buffer).device is memory_of(buffer, device=True).device is None
    assert (memory_of(given).on_host() == 0).all()


def test_tensors(libraries: Callable[..., None]) -> None:
    libraries(FakeTorch(0))
    memory = memory_of(FakeTorch.Tensor("cuda:3"), device=True)
    assert (memory.address, memory.nbytes, memory.device) == (0x7000, 12, 3)
    assert memory.native_dtype == "bfloat16"
    assert memory_of(FakeTorch.Tensor("cpu")).device is None
    with pytest.raises(BufferRefusedError, match="not contiguous"):
        memory_of(FakeTorch.Tensor("cuda:3", contiguous=False), device=True)
    with pytest.raises(BufferRefusedError, match="only host memory works here"):
        memory_of(FakeTorch.Tensor("cuda:3"))
    with pytest.raises(BufferRefusedError, match="only the host's memory and CUDA's"):
        memory_of(FakeTorch.Tensor("xpu:0"), device=True)


_WITHOUT_A_GPU = """
import cupy, numpy as np, pgasdl
from pgasdl import loopback

def program(ctx):
    segment = ctx.segment(64)
    array = segment.numpy(np.float32)
    array[:] = ctx.rank
    ctx.allreduce(array)
    for refused in (
        lambda: ctx.segment(64, device="cuda"),
        lambda: ctx.segment(64, device=cupy.cuda.Device(0)),
        lambda: segment.cupy(np.float32),
    ):
        try:
            refused()
        except pgasdl.errors.UnavailableError:
            continue
        raise AssertionError("not refused")
    return array.tolist()

assert loopback.run(2, program) == [[1.0] * 16] * 2
pgasdl.show_versions()
"""


@pytest.mark.full
def test_cupy_itself_where_there_is_no_gpu() -> None:
    """Extra ``gpu``: to import it changes nothing on the host; what needs a GPU is refused."""
    pytest.importorskip("cupy")
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_A_GPU], capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"^cupy +\d", done.stdout, re.M)
