"""pgasdl's kernels alone: their bits, by the test of the core, and how much memory they move."""

from __future__ import annotations

import ctypes
import statistics
import sys
from pathlib import Path

import ptx
from cuda_arrays import Array, Device, Stream

from on_device import driver, ranks
from on_device.findings import NotAvailable, Tell

ROOT = Path(__file__).parents[3]
NATIVE_TEST = ROOT / "build" / "native-plain" / "tests" / "test_device_reduce"
BLOCK = 512
# Their numbers in native/reduce/types.hpp, and bytes.
DTYPES = {"f32": (0, 4), "f64": (1, 8), "f16": (2, 2), "bf16": (3, 2), "i32": (4, 4), "i64": (5, 8)}


class Reduction(ctypes.Structure):
    """``DeviceReduction`` of native/reduce/device_kernels.hpp."""

    _fields_ = (
        ("sources", ctypes.c_uint64 * 64),
        ("destinations", ctypes.c_uint64 * 64),
        ("source_dtypes", ctypes.c_uint8 * 64),
        ("destination_dtypes", ctypes.c_uint8 * 64),
        ("n", ctypes.c_uint64),
        ("head", ctypes.c_uint64),
        ("vectors", ctypes.c_uint64),
        ("scale", ctypes.c_double),
        ("scale_f32", ctypes.c_float),
        ("n_sources", ctypes.c_uint32),
        ("n_destinations", ctypes.c_uint32),
    )


class Sum:
    """A sum of arrays that begin at vectors, written to arrays; launched by itself."""

    def __init__(self, dtype: str, sources: list[int], destinations: list[int], nbytes: int):
        number, size = DTYPES[dtype]
        own = {("f32", 1), *((each, 2) for each in DTYPES)}
        special = len(sources) if (dtype, len(sources)) in own else 0
        self._name = f"pgasdl_sum_{dtype}_{special}"
        self._kernel = driver.Kernel(ptx.read(), self._name)
        self._of = Reduction(
            n=nbytes // size, vectors=nbytes // 16, scale=1.0, scale_f32=1.0,
            n_sources=len(sources), n_destinations=len(destinations),
        )  # fmt: skip
        for i, address in enumerate(sources):
            self._of.sources[i], self._of.source_dtypes[i] = address, number
        for i, address in enumerate(destinations):
            self._of.destinations[i], self._of.destination_dtypes[i] = address, number
        self.moves = nbytes * (len(sources) + len(destinations))

    def launch(self, stream: Stream, blocks: int) -> None:
        self._kernel.launch(self._name, stream, blocks, BLOCK, self._of)

    def rate(self, stream: Stream, blocks: int, times: int) -> float:
        """Bytes read and written in a second, the median of a few launches."""
        together = 4
        self.launch(stream, blocks)
        stream.synchronize()

        def launches() -> None:
            for _ in range(together):
                self.launch(stream, blocks)
            stream.synchronize()

        taken = statistics.median(driver.timed(launches) for _ in range(times))
        return together * self.moves / taken


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    with tell.step("rates"):
        rates(tell, smoke)
    if smoke:
        return
    with tell.step("test_device_reduce on the device"):
        build()
        ranks.finished([str(NATIVE_TEST)], timeout=60)
        tell.check("test_device_reduce on the device", True)


def rates(tell: Tell, smoke: bool) -> None:
    """By dtype, sources and blocks on each multiprocessor."""
    nbytes, times = (1 << 14, 2) if smoke else (256 << 20, 7)
    with Device():
        stream = Stream()
        places = [Array(nbytes, "u1").address for _ in range(4)]
        addresses = [address for address in places if address is not None]
        for n, dtype in ((2, "f32"), (4, "f32"), (2, "bf16"), (4, "bf16"), (2, "f64"), (2, "f16")):
            there = addresses[:n]
            reduction = Sum(dtype, there, there, nbytes)
            by_blocks = {
                blocks: reduction.rate(stream, blocks * driver.multiprocessors(), times) / 1e9
                for blocks in (1, 2, 4, 8)
            }
            tell(f"{n} arrays of {dtype}, in place", by_blocks[2], "GB/s", by_blocks=by_blocks)


def build() -> None:
    """Build the core's test of the kernels."""
    sys.path.insert(0, str(ROOT / "tests" / "native"))
    from building import Build, missing_tools

    if missing := missing_tools():
        raise NotAvailable(f"building it needs {', '.join(missing)}")
    Build("plain").make("test_device_reduce")
